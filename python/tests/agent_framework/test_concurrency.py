"""How many calls run at once: never more than the limit says, and whoever ends lets the next one run."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import agent_framework
import pytest
from agent_framework import (
    FunctionInvocationContext,
    FunctionMiddleware,
    MiddlewareTermination,
    function_middleware,
)
from agent_framework._middleware import FunctionMiddlewarePipeline

from callgate import Decision, ToolRateLimit
from callgate.agent_framework import ToolRateLimitMiddleware
from tests.agent_framework.scripted import (
    OfflineChatClient,
    agent_of,
    assert_answered,
    both_ways,
    calls,
    last_results,
    recorded,
    rejections,
    remaining,
    run,
)
from tests.clocks import FakeClock

CURRENT = hasattr(agent_framework, "MiddlewareFailure")
"""Whether this is agent-framework-core 1.15 or later."""


def running(count: int, burst: int = 100, **options: Any) -> dict[str, ToolRateLimit]:
    """The limit of one tool of which so many calls may run at once."""
    return {"lookup": ToolRateLimit(1, burst, max_concurrent=count, **options)}


@dataclass
class Counter:
    """What a tool does: it counts those in it, and stays for a while."""

    inside: int = 0
    most: int = 0

    async def __call__(self, call: str) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            for _ in range(3):
                await asyncio.sleep(0)
        finally:
            self.inside -= 1


def assert_all_may_run(limiter: ToolRateLimitMiddleware, count: int) -> None:
    """Checks that so many calls may run now, and not one more."""
    decisions = [limiter.limiter.try_acquire("lookup") for _ in range(count + 1)]
    try:
        assert [decision.reason for decision in decisions] == [None] * count + ["concurrency"]
    finally:
        for decision in decisions:
            with decision:
                pass


@both_ways
@pytest.mark.parametrize("count", [1, 3])
async def test_calls_wait_for_others_to_end_and_no_more_run_than_may(
    count: int, clock: FakeClock, *, stream: bool
) -> None:
    counter = Counter()
    lookup = recorded(act=counter)
    limiter = ToolRateLimitMiddleware(running(count, max_wait=10), clock=clock)
    client = OfflineChatClient(calls("lookup", 8), "done")
    await run(agent_of(client, lookup, middleware=[limiter]), stream=stream)
    assert lookup.started == [f"c{number}" for number in range(1, 9)]
    assert counter.most == count
    assert rejections(last_results(client)) == {}
    assert_answered(client.requests[-1])
    assert_all_may_run(limiter, count)


@both_ways
async def test_without_waiting_those_that_may_not_run_are_rejected_and_spend_nothing(
    clock: FakeClock, *, stream: bool
) -> None:
    counter = Counter()
    lookup = recorded(act=counter)
    limiter = ToolRateLimitMiddleware(running(2), clock=clock)
    client = OfflineChatClient(calls("lookup", 5), calls("lookup", 2, "d"), "done")
    await run(agent_of(client, lookup, middleware=[limiter]), stream=stream)
    assert lookup.started == ["c1", "c2", "d1", "d2"]
    assert counter.most == 2
    found = last_results(client)
    refused = rejections(found)
    assert list(refused) == ["c3", "c4", "c5"]
    assert refused["c3"] == {
        "tool": "lookup",
        "limit": "lookup",
        "reason": "concurrency",
        "remaining": 98,
        "retry_after": None,
    }
    assert found["c3"].result == (
        "Rate limit exceeded for tool 'lookup'. "
        "Too many calls run at the same time: retry when one of them has ended."
    )
    assert remaining(limiter) == 96


async def test_sync_tools_are_counted_too(clock: FakeClock) -> None:
    lookup = recorded(sync=True)
    limiter = ToolRateLimitMiddleware(running(1, max_wait=10), clock=clock)
    client = OfflineChatClient(calls("lookup", 4), "done")
    await run(agent_of(client, lookup, middleware=[limiter]))
    assert lookup.started == ["c1", "c2", "c3", "c4"]
    assert_all_may_run(limiter, 1)


# --- every way out -------------------------------------------------------------------------------


def fail(_call: str) -> None:
    raise RuntimeError


def cancel_itself(_call: str) -> None:
    raise asyncio.CancelledError


def terminate(_call: str) -> None:
    raise MiddlewareTermination("enough")


def end_run(_call: str) -> None:
    raise agent_framework.MiddlewareFailure("enough")


async def time_out(_call: str) -> None:
    await asyncio.wait_for(asyncio.Event().wait(), 0)


WAYS_OUT = [fail, cancel_itself, terminate, time_out, *([end_run] if CURRENT else [])]


@both_ways
@pytest.mark.parametrize("act", WAYS_OUT)
async def test_however_a_tool_ends_the_next_call_may_run(
    act: Callable[[str], Any], clock: FakeClock, *, stream: bool
) -> None:
    lookup = recorded(act=act)
    limiter = ToolRateLimitMiddleware(running(2), clock=clock)
    client = OfflineChatClient(calls("lookup", 2), "done")
    with suppress(BaseException):
        await asyncio.create_task(
            run(agent_of(client, lookup, middleware=[limiter]), stream=stream)
        )
    assert lookup.started
    assert_all_may_run(limiter, 2)
    assert remaining(limiter) == 100 - len(lookup.started) - 2


@pytest.mark.parametrize("act", WAYS_OUT)
async def test_however_middleware_inside_ends_the_next_call_may_run(
    act: Callable[[str], Any], clock: FakeClock
) -> None:
    @function_middleware
    async def inside(context: FunctionInvocationContext, call_next: Any) -> None:
        done = act("")
        if done is not None:
            await done

    lookup = recorded()
    limiter = ToolRateLimitMiddleware(running(1), clock=clock)
    client = OfflineChatClient(calls("lookup", 1), "done")
    with suppress(BaseException):
        await asyncio.create_task(run(agent_of(client, lookup, middleware=[limiter, inside])))
    assert lookup.started == []
    assert_all_may_run(limiter, 1)


@both_ways
async def test_a_run_that_is_cancelled_lets_others_run(clock: FakeClock, *, stream: bool) -> None:
    arrived = asyncio.Event()

    async def never_end(_call: str) -> None:
        arrived.set()
        await asyncio.Event().wait()

    stuck = recorded(act=never_end)
    limiter = ToolRateLimitMiddleware(running(1, max_wait=10), clock=clock)
    client = OfflineChatClient(calls("lookup", 3), "never said")
    task = asyncio.ensure_future(run(agent_of(client, stuck, middleware=[limiter]), stream=stream))
    await asyncio.wait_for(arrived.wait(), 30)
    # Another run waits behind it.
    lookup = recorded()
    other = asyncio.ensure_future(
        run(agent_of(OfflineChatClient(calls("lookup", 2), "done"), lookup, middleware=[limiter]))
    )
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(other, 30)
    assert stuck.started == ["c1"]
    assert lookup.started == ["c1", "c2"]
    assert remaining(limiter) == 97
    assert_all_may_run(limiter, 1)


@both_ways
@pytest.mark.skipif(not CURRENT, reason="needs agent-framework-core 1.15 or later")
async def test_a_rejection_that_ends_the_run_lets_others_run(
    clock: FakeClock, *, stream: bool
) -> None:
    stuck = recorded(act=lambda _call: asyncio.Event().wait())
    limiter = ToolRateLimitMiddleware(running(2), on_rejected="raise", clock=clock)
    client = OfflineChatClient(calls("lookup", 3), "never said")
    with pytest.raises(agent_framework.MiddlewareFailure):
        await run(agent_of(client, stuck, middleware=[limiter]), stream=stream)
    assert stuck.started == ["c1", "c2"]
    assert_all_may_run(limiter, 2)


async def test_a_stream_that_is_left_while_its_tools_run_lets_others_run(clock: FakeClock) -> None:
    arrived = asyncio.Event()

    async def never_end(_call: str) -> None:
        arrived.set()
        await asyncio.Event().wait()

    limiter = ToolRateLimitMiddleware(running(1), clock=clock)
    client = OfflineChatClient(calls("lookup", 1), "never said")
    agent = agent_of(client, recorded(act=never_end), middleware=[limiter])
    updates = aiter(agent.run("go", stream=True))
    assert (await anext(updates)).contents[0].type == "function_call"
    reading = asyncio.ensure_future(anext(updates))
    await asyncio.wait_for(arrived.wait(), 30)
    assert limiter.limiter.try_acquire("lookup").reason == "concurrency"
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert_all_may_run(limiter, 1)


def test_a_call_whose_loop_is_closed_and_thrown_away_lets_others_run(clock: FakeClock) -> None:
    limiter = ToolRateLimitMiddleware(running(1), clock=clock)

    def abandon() -> None:
        # Below an agent, whose own spans do not bear it.
        arrived = asyncio.Event()

        async def never_end(_context: FunctionInvocationContext) -> None:
            arrived.set()
            await asyncio.Event().wait()

        context = FunctionInvocationContext(function=recorded().tool, arguments={"call": "c1"})
        loop = asyncio.new_event_loop()
        task = loop.create_task(FunctionMiddlewarePipeline(limiter).execute(context, never_end))
        loop.run_until_complete(arrived.wait())
        assert not task.done()
        assert limiter.limiter.try_acquire("lookup").reason == "concurrency"
        loop.set_exception_handler(lambda _loop, _said: None)  # A task was destroyed, it says.
        loop.close()

    abandon()
    gc.collect()
    assert_all_may_run(limiter, 1)


# --- beside other middleware, and in a dry run ---------------------------------------------------


async def test_a_call_is_over_when_the_middleware_inside_of_the_limiter_is(
    clock: FakeClock,
) -> None:
    class Outside(FunctionMiddleware):
        async def process(self, context: FunctionInvocationContext, call_next: Any) -> None:
            await call_next()
            assert_all_may_run(limiter, 1)
            seen.append("outside")

    class Inside(FunctionMiddleware):
        async def process(self, context: FunctionInvocationContext, call_next: Any) -> None:
            await call_next()
            assert limiter.limiter.try_acquire("lookup").reason == "concurrency"
            seen.append("inside")

    seen: list[str] = []
    limiter = ToolRateLimitMiddleware(running(1), clock=clock)
    client = OfflineChatClient(calls("lookup", 1), "done")
    await run(agent_of(client, recorded(), middleware=[Outside(), limiter, Inside()]))
    assert seen == ["inside", "outside"]


async def test_a_rejection_that_takes_a_while_to_word_holds_nothing(clock: FakeClock) -> None:
    async def on_rejected(context: FunctionInvocationContext, decision: Decision) -> str:
        await first_ended.wait()
        assert_all_may_run(limiter, 1)
        return "busy"

    first_ended = asyncio.Event()
    lookup = recorded(act=lambda _call: asyncio.sleep(0))
    limiter = ToolRateLimitMiddleware(running(1), on_rejected=on_rejected, clock=clock)

    @function_middleware
    async def outside(context: FunctionInvocationContext, call_next: Any) -> None:
        await call_next()
        first_ended.set()

    client = OfflineChatClient(calls("lookup", 2), "done")
    await asyncio.wait_for(run(agent_of(client, lookup, middleware=[outside, limiter])), 30)
    assert [content.result for content in last_results(client).values()] == [
        "lookup found c1",
        "busy",
    ]


@function_middleware
async def three_attempts(context: FunctionInvocationContext, call_next: Any) -> None:
    for _ in range(3):
        with suppress(RuntimeError):
            await call_next()


@pytest.mark.parametrize("outside", [0, 1, 2])
@pytest.mark.parametrize("inside", [1, 2])
@pytest.mark.parametrize("act", [fail, None])
async def test_r37_attempts_end_before_the_next_begins_wherever_else_it_is_registered(
    outside: int, inside: int, act: Callable[[str], Any] | None, clock: FakeClock
) -> None:
    lookup = recorded(act=act)
    limiter = ToolRateLimitMiddleware(running(1), clock=clock)
    client = OfflineChatClient(calls("lookup", 1), "done")
    stack = [*[limiter] * outside, three_attempts, *[limiter] * inside]
    await run(agent_of(client, lookup, middleware=stack))
    assert lookup.started == ["c1"] * 3
    assert_all_may_run(limiter, 1)
    assert remaining(limiter) == 96


@pytest.mark.parametrize("count", [2, 3])
async def test_r37_what_is_made_of_one_call_in_tasks_of_their_own_runs_beside_it(
    count: int, clock: FakeClock
) -> None:
    @function_middleware
    async def hedge(context: FunctionInvocationContext, call_next: Any) -> None:
        await asyncio.gather(call_next(), call_next(), call_next())

    lookup = recorded(act=lambda _call: asyncio.sleep(0))
    limiter = ToolRateLimitMiddleware(running(count), clock=clock)
    client = OfflineChatClient(calls("lookup", 1), "done")
    await run(agent_of(client, lookup, middleware=[limiter, hedge, limiter]))
    # The call that they are made of counts as running, since nobody knows what becomes of it.
    assert lookup.started == ["c1"] * (count - 1)
    assert_all_may_run(limiter, count)
