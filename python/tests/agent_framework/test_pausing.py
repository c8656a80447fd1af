"""Tools whose service answers 429 or 503 with Retry-After: they pause, where that is asked for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from importlib.util import find_spec
from threading import Thread
from typing import Any

import agent_framework
import pytest
from agent_framework import FunctionInvocationContext, FunctionMiddleware, function_middleware

from callgate import ConfigError, Limiter, ToolRateLimit
from callgate.agent_framework import ToolRateLimitMiddleware
from tests.agent_framework.scripted import (
    OfflineChatClient,
    Recorded,
    agent_of,
    assert_answered,
    both_ways,
    calls,
    last_results,
    limits,
    recorded,
    rejections,
    run,
)
from tests.clocks import FakeClock

CURRENT = hasattr(agent_framework, "MiddlewareFailure")
"""Whether this is agent-framework-core 1.15 or later."""

HTTPX: Any = import_module("httpx2" if find_spec("httpx2") else "httpx")
"""The one that the framework's version comes with."""

Raise = Callable[[int, Mapping[str, str]], None]


def of_httpx(status: int, headers: Mapping[str, str]) -> None:
    request = HTTPX.Request("GET", "http://crm.test/")
    HTTPX.Response(status, headers=headers, request=request).raise_for_status()


def of_requests(status: int, headers: Mapping[str, str]) -> None:
    requests = pytest.importorskip("requests", reason="comes with the newest version's tests")
    response = requests.Response()
    response.status_code = status
    response.headers.update(headers)
    response.raise_for_status()


def refusing(
    answer: Raise = of_httpx,
    status: int = 429,
    headers: Mapping[str, str] | None = None,
    *,
    sync: bool = False,
) -> Recorded:
    """A tool whose service refuses its first call, by default for 5 s."""

    def act(call: str) -> None:
        if call == "c1":
            answer(status, {"Retry-After": "5"} if headers is None else headers)

    return recorded(act=act, sync=sync)


def pausing(limit: Any = None, **options: Any) -> ToolRateLimitMiddleware:
    """A limiter with room for ten calls, and pauses."""
    return ToolRateLimitMiddleware(limit or limits(2, 10), pause_on_retry_after=True, **options)


def turns(count: int) -> OfflineChatClient:
    """A model that calls the tool so many times, one after another."""
    return OfflineChatClient(*[[call] for call in calls("lookup", count)], "done")


NOW = 784_111_777
"""Seconds since 1970, and then an HTTP date."""

IN_5_S = {
    "Retry-After": formatdate(NOW + 5, usegmt=True),
    "Date": formatdate(NOW, usegmt=True),
}


@both_ways
@pytest.mark.parametrize("answer", [of_httpx, of_requests])
@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("headers", [{"Retry-After": "5"}, IN_5_S], ids=["seconds", "date"])
async def test_after_such_an_answer_calls_are_rejected_until_the_service_wants_some_again(
    answer: Raise,
    status: int,
    headers: Mapping[str, str],
    clock: FakeClock,
    *,
    stream: bool,
) -> None:
    lookup, limiter = refusing(answer, status, headers), pausing(clock=clock)
    client = turns(3)
    await run(agent_of(client, lookup, middleware=[limiter]), stream=stream)

    found = last_results(client)
    assert str(status) in str(found["c1"].exception)
    assert lookup.started == ["c1"]
    assert set(rejections(found)) == {"c2", "c3"}
    # Then there is one more token.
    assert rejections(found)["c2"] == {
        "tool": "lookup",
        "limit": "lookup",
        "reason": "paused",
        "remaining": 0,
        "retry_after": pytest.approx(5.5),
    }
    assert found["c2"].result == "Rate limit exceeded for tool 'lookup'. Retry in 5.5 seconds."
    assert_answered(client.requests[-1])

    clock.advance(5.5)
    client = OfflineChatClient(calls("lookup", 1, "d"), "done")
    await run(agent_of(client, lookup, middleware=[limiter]), stream=stream)
    assert lookup.started == ["c1", "d1"]


@pytest.mark.parametrize("sync", [False, True])
async def test_sync_tools_pause_too(clock: FakeClock, *, sync: bool) -> None:
    lookup, client = refusing(sync=sync), turns(2)
    await run(agent_of(client, lookup, middleware=[pausing(clock=clock)]))
    assert lookup.started == ["c1"]
    assert rejections(last_results(client))["c2"]["reason"] == "paused"


async def test_calls_that_wait_are_rejected_where_the_pause_is_too_long_for_them(
    clock: FakeClock,
) -> None:
    failed = asyncio.Event()

    async def act(call: str) -> None:
        # The others wait by then.
        await asyncio.sleep(0)
        failed.set()
        of_httpx(429, {"Retry-After": "60"})

    lookup = recorded(act=act)
    limiter = pausing({"lookup": ToolRateLimit(1, 1, max_wait=10)}, clock=clock)
    client = OfflineChatClient(calls("lookup", 3), "done")
    agent = agent_of(client, lookup, middleware=[limiter])
    await asyncio.wait_for(run(agent), 30)
    assert lookup.started == ["c1"]
    refused = rejections(last_results(client))
    assert {call: refused[call]["reason"] for call in refused} == {"c2": "paused", "c3": "paused"}


async def test_a_tool_does_not_pause_unless_that_is_asked_for(clock: FakeClock) -> None:
    lookup, client = refusing(), turns(3)
    limiter = ToolRateLimitMiddleware(limits(2, 10), clock=clock)
    await run(agent_of(client, lookup, middleware=[limiter]))
    assert lookup.started == ["c1", "c2", "c3"]


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (429, {}),
        (429, {"Retry-After": "0"}),
        (429, {"Retry-After": "soon"}),
        (503, {}),
        (500, {"Retry-After": "5"}),
        (404, {"Retry-After": "5"}),
    ],
)
async def test_other_answers_are_left_alone(
    status: int, headers: Mapping[str, str], clock: FakeClock
) -> None:
    lookup, client = refusing(of_httpx, status, headers), turns(2)
    await run(agent_of(client, lookup, middleware=[pausing(clock=clock)]))
    assert lookup.started == ["c1", "c2"]
    assert last_results(client)["c1"].exception is not None


async def test_a_tool_without_a_limit_is_left_alone(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    lookup, client = refusing(), turns(2)
    limiter = pausing(limits(tool="another"), clock=clock)
    await run(agent_of(client, lookup, middleware=[limiter]))
    assert lookup.started == ["c1", "c2"]
    assert "HTTP" in str(last_results(client)["c1"].exception)
    assert "callgate" not in {record.name for record in caplog.records}


async def test_under_the_default_only_the_tool_itself_pauses(clock: FakeClock) -> None:
    limiter = Limiter({}, default=ToolRateLimit(1, 10), clock=clock)
    lookup, other = refusing(), recorded("other")
    client = OfflineChatClient(
        calls("lookup", 1), [*calls("lookup", 1, "d"), *calls("other", 1, "o")], "done"
    )
    await run(agent_of(client, lookup, other, middleware=[pausing(limiter)]))
    assert other.started == ["o1"]
    assert set(rejections(last_results(client))) == {"d1"}


async def test_the_error_goes_on_as_it_was(clock: FakeClock) -> None:
    seen: list[BaseException] = []

    class Outside(FunctionMiddleware):
        async def process(self, context: FunctionInvocationContext, call_next: Any) -> None:
            try:
                await call_next()
            except Exception as error:
                seen.append(error)
                raise

    lookup, client = refusing(), turns(1)
    await run(agent_of(client, lookup, middleware=[Outside(), pausing(clock=clock)]))
    (error,) = seen
    assert isinstance(error, HTTPX.HTTPStatusError)
    assert error.__cause__ is None
    assert error.__context__ is None


async def test_middleware_inside_that_handles_the_error_handles_the_pause(clock: FakeClock) -> None:
    @function_middleware
    async def handle(context: FunctionInvocationContext, call_next: Any) -> None:
        with suppress(HTTPX.HTTPStatusError):
            await call_next()

    lookup, client = refusing(), turns(2)
    await run(agent_of(client, lookup, middleware=[pausing(clock=clock), handle]))
    assert lookup.started == ["c1", "c2"]


@pytest.mark.parametrize("pauses", [(True, True), (True, False), (False, True)])
async def test_r37_a_limiter_that_is_registered_twice_pauses_wherever_that_is_asked_for(
    pauses: tuple[bool, bool], clock: FakeClock
) -> None:
    limiter = Limiter(limits(2, 10), clock=clock)
    middleware = [ToolRateLimitMiddleware(limiter, pause_on_retry_after=way) for way in pauses]
    lookup, client = refusing(), turns(2)
    await run(agent_of(client, lookup, middleware=middleware))
    assert lookup.started == ["c1"]
    assert rejections(last_results(client))["c2"]["retry_after"] == pytest.approx(5.5)


async def test_a_tool_of_an_inner_agent_pauses_and_the_agent_as_a_tool_does_not(
    clock: FakeClock,
) -> None:
    limiter = pausing({"ask": ToolRateLimit(2, 10), **limits(2, 10)}, clock=clock)
    lookup = refusing()
    inner_client = OfflineChatClient(calls("lookup", 1), calls("lookup", 1, "d"), "half", "rest")
    inner = agent_of(inner_client, lookup, middleware=[limiter])
    asking = [[(f"a{number}", "ask", {"task": "find it"})] for number in (1, 2)]
    client = OfflineChatClient(*asking, "done")
    await run(agent_of(client, inner.as_tool(name="ask"), middleware=[limiter]))
    assert lookup.started == ["c1"]
    assert [content.result for content in last_results(client).values()] == ["half", "rest"]


@pytest.mark.skipif(not CURRENT, reason="needs agent-framework-core 1.15 or later")
async def test_an_error_that_ends_the_run_pauses_the_tool_too(clock: FakeClock) -> None:
    def act(_call: str) -> None:
        try:
            of_httpx(503, {"Retry-After": "5"})
        except HTTPX.HTTPStatusError as error:
            raise agent_framework.MiddlewareFailure("the CRM is down") from error

    limiter = pausing(clock=clock)
    with pytest.raises(agent_framework.MiddlewareFailure, match="the CRM is down"):
        await run(agent_of(turns(1), recorded(act=act), middleware=[limiter]))
    assert limiter.limiter.try_acquire("lookup").reason == "paused"


async def test_in_a_dry_run_a_pause_rejects_nothing(clock: FakeClock) -> None:
    limiter = Limiter(limits(2, 10), dry_run=True, clock=clock)
    lookup, client = refusing(), turns(2)
    await run(agent_of(client, lookup, middleware=[pausing(limiter)]))
    assert lookup.started == ["c1", "c2"]
    decision = limiter.try_acquire("lookup")
    assert (decision.admitted, decision.reason) == (True, "paused")


@pytest.mark.parametrize("given", [None, 1, 0, "yes"])
def test_whether_to_pause_is_a_bool(given: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        ToolRateLimitMiddleware(limits(), pause_on_retry_after=given)
    assert str(refused.value) == f"pause_on_retry_after must be True or False, got {given!r}"


# --- a real service ------------------------------------------------------------------------------


@contextmanager
def service(pause: str) -> Generator[tuple[str, list[float]]]:
    """Refuses the first request: its address, and when it was asked."""
    asked: list[float] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(time.monotonic())
            self.send_response(429 if len(asked) == 1 else 200)
            if len(asked) == 1:
                self.send_header("Retry-After", pause)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/", asked
        finally:
            server.shutdown()
            thread.join()


@both_ways
async def test_calls_that_may_wait_do_so_until_a_real_service_wants_them_again(
    *, stream: bool
) -> None:
    with service("0.2") as (url, asked):

        async def act(_call: str) -> None:
            async with HTTPX.AsyncClient(trust_env=False) as client:
                (await client.get(url)).raise_for_status()

        limiter = pausing({"lookup": ToolRateLimit(100, 10, max_wait=10)})
        client = OfflineChatClient(calls("lookup", 1), calls("lookup", 3, "d"), "done")
        agent = agent_of(client, recorded(act=act), middleware=[limiter])
        await asyncio.wait_for(run(agent, stream=stream), 30)
    found = last_results(client)
    assert [call for call in found if found[call].exception is not None] == ["c1"]
    assert rejections(found) == {}
    assert len(asked) == 4
    assert asked[1] - asked[0] >= 0.2
