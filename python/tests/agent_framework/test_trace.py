"""The trace of calls: one line for each, whatever becomes of it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from agent_framework import (
    FunctionInvocationContext,
    FunctionMiddleware,
    MiddlewareTermination,
)

from callgate import ConfigError, Limiter, ToolRateLimit, Trace
from callgate.agent_framework import ToolRateLimitMiddleware
from tests.agent_framework.scripted import (
    OfflineChatClient,
    agent_of,
    both_ways,
    calls,
    limits,
    recorded,
    run,
)
from tests.agent_framework.test_cancellation import cancel_once
from tests.clocks import FakeClock


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return Trace(tmp_path / "calls.jsonl")


def lines(trace: Trace) -> list[dict[str, Any]]:
    """What was written of the calls that have ended."""
    assert trace.flush()
    assert trace.dropped == 0
    return [json.loads(line) for line in trace.path.read_text().splitlines()]


def outcomes(trace: Trace) -> list[str]:
    return sorted(line["outcome"] for line in lines(trace))


async def fail(_call: str) -> None:
    raise OSError("no")


@both_ways
async def test_each_call_of_a_turn_is_one_line(
    trace: Trace, clock: FakeClock, *, stream: bool
) -> None:
    lookup = recorded()
    middleware = ToolRateLimitMiddleware(limits(burst=2), trace=trace, clock=clock)
    client = OfflineChatClient(calls("lookup", 3), "done")
    await run(agent_of(client, lookup, middleware=[middleware]), stream=stream)
    assert outcomes(trace) == ["ok", "ok", "rejected"]
    for line in lines(trace):
        assert line["tool"] == "lookup"
        assert "waited" not in line
        assert ("duration" in line) == (line["outcome"] == "ok")


async def test_the_keys_are_in_the_order_of_the_format(trace: Trace, clock: FakeClock) -> None:
    limit = ToolRateLimit(1, burst=9, per=["tenant"])
    middleware = ToolRateLimitMiddleware(
        {"lookup": limit}, cost=lambda _: 3, trace=trace, clock=clock
    )
    client = OfflineChatClient(calls("lookup", 1), "done")
    agent = agent_of(client, recorded(), middleware=[middleware])
    await run(agent, function_invocation_kwargs={"tenant": "acme"})
    [line] = lines(trace)
    assert list(line) == ["time", "tool", "fields", "cost", "duration", "outcome"]
    assert line["fields"] == {"tenant": hashlib.sha256(b"acme").hexdigest()[:16]}
    assert line["cost"] == 3


async def test_fields_are_asked_for_where_no_limit_needs_any(
    tmp_path: Path, clock: FakeClock
) -> None:
    trace = Trace(tmp_path / "calls.jsonl", plain_fields=True)
    middleware = ToolRateLimitMiddleware(
        limits(), fields=lambda _: {"tenant": "Ä", "user": None, "n": 7}, trace=trace, clock=clock
    )
    client = OfflineChatClient(calls("lookup", 1) + calls("free", 1, "f"), "done")
    agent = agent_of(client, recorded(), recorded("free"), middleware=[middleware])
    await run(agent)
    assert [line["fields"] for line in lines(trace)] == [{"tenant": "Ä", "n": "7"}] * 2


async def test_a_tool_that_raises_is_an_error(trace: Trace) -> None:
    middleware = ToolRateLimitMiddleware(limits(), trace=trace)
    client = OfflineChatClient(calls("lookup", 1), "done")
    await run(agent_of(client, recorded(act=fail), middleware=[middleware]))
    assert outcomes(trace) == ["error"]


async def test_middleware_that_ends_the_loop_is_no_error(trace: Trace) -> None:
    class Ends(FunctionMiddleware):
        async def process(self, context: FunctionInvocationContext, call_next: Any) -> None:
            await call_next()
            raise MiddlewareTermination(result=context.result)

    middleware = ToolRateLimitMiddleware(limits(), trace=trace)
    client = OfflineChatClient(calls("lookup", 1), "never said")
    await run(agent_of(client, recorded(), middleware=[middleware, Ends()]))
    assert outcomes(trace) == ["ok"]


@both_ways
async def test_a_run_that_is_cancelled_while_its_tool_runs(trace: Trace, *, stream: bool) -> None:
    arrived = asyncio.Event()

    async def hang(_call: str) -> None:
        arrived.set()
        await asyncio.Event().wait()

    middleware = ToolRateLimitMiddleware(limits(), trace=trace)
    client = OfflineChatClient(calls("lookup", 1), "never said")
    agent = agent_of(client, recorded(act=hang), middleware=[middleware])
    await cancel_once(arrived, asyncio.ensure_future(run(agent, stream=stream)))
    [line] = lines(trace)
    assert line["outcome"] == "cancelled"
    assert "duration" in line


async def test_a_call_that_waits_and_one_that_is_cancelled_while_it_does(trace: Trace) -> None:
    limit = ToolRateLimit(1_000, burst=1, max_wait=60, max_concurrent=1)
    arrived = asyncio.Event()
    goes_on = asyncio.Event()

    async def hang(_call: str) -> None:
        arrived.set()
        await goes_on.wait()

    asked = 0
    all_asked = asyncio.Event()

    def fields(_context: FunctionInvocationContext) -> dict[str, str | int | None]:
        # Right before a call is decided on, with nothing in between that yields.
        nonlocal asked
        asked += 1
        if asked == 3:
            all_asked.set()
        return {}

    middleware = ToolRateLimitMiddleware({"lookup": limit}, fields=fields, trace=trace)

    def agent() -> Any:
        client = OfflineChatClient(calls("lookup", 1), "done")
        return agent_of(client, recorded(act=hang), middleware=[middleware])

    first = asyncio.ensure_future(run(agent()))
    await asyncio.wait_for(arrived.wait(), 30)
    second = asyncio.ensure_future(run(agent()))
    third = asyncio.ensure_future(run(agent()))
    await asyncio.wait_for(all_asked.wait(), 30)
    third.cancel()
    with pytest.raises(asyncio.CancelledError):
        await third
    goes_on.set()
    await asyncio.gather(first, second)
    cancelled, ended, waited = lines(trace)
    assert (cancelled["outcome"], ended["outcome"], waited["outcome"]) == ("cancelled", "ok", "ok")
    assert cancelled["waited"] > 0
    assert "duration" not in cancelled
    assert "waited" not in ended
    assert waited["waited"] > 0


async def test_in_a_dry_run_the_line_says_what_became_of_the_call(
    trace: Trace, clock: FakeClock
) -> None:
    limiter = Limiter(limits(), dry_run=True, clock=clock)
    middleware = ToolRateLimitMiddleware(limiter, trace=trace)
    client = OfflineChatClient(calls("lookup", 2), "done")
    await run(agent_of(client, recorded(), middleware=[middleware]))
    assert outcomes(trace) == ["ok", "ok"]


async def test_a_limiter_that_is_registered_twice_writes_one_line(
    trace: Trace, clock: FakeClock
) -> None:
    limiter = Limiter(limits(burst=9), clock=clock)
    both = [ToolRateLimitMiddleware(limiter, trace=trace) for _ in range(2)]
    client = OfflineChatClient(calls("lookup", 2), "done")
    await run(agent_of(client, recorded(), middleware=both))
    assert outcomes(trace) == ["ok", "ok"]


async def test_a_call_that_is_not_decided_on_has_no_line(trace: Trace) -> None:
    def broken(_context: FunctionInvocationContext) -> dict[str, str | int | None]:
        raise LookupError("no tenant")

    middleware = ToolRateLimitMiddleware(limits(), fields=broken, trace=trace)
    lookup = recorded()
    client = OfflineChatClient(calls("lookup", 1), "done")
    await run(agent_of(client, lookup, middleware=[middleware]))
    assert lookup.started == []
    assert lines(trace) == []


async def test_a_path_is_a_trace(tmp_path: Path) -> None:
    middleware = ToolRateLimitMiddleware(limits(), trace=str(tmp_path / "calls.jsonl"))
    client = OfflineChatClient(calls("lookup", 1), "done")
    await run(agent_of(client, recorded(), middleware=[middleware]))
    assert middleware._trace is not None
    assert middleware._trace.path == tmp_path / "calls.jsonl"
    assert outcomes(middleware._trace) == ["ok"]


def test_what_is_no_path_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^trace must be a Trace or a file's path, got 3$"):
        ToolRateLimitMiddleware(limits(), trace=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
