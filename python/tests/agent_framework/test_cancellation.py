"""Cancelling a run before, during and after a call's admission.

A token is spent once where the call was admitted, and never otherwise; `CancelledError` gets
through; nothing stays held.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from agent_framework import FunctionInvocationContext, FunctionMiddleware
from agent_framework._middleware import FunctionMiddlewarePipeline

from callgate import Decision
from callgate.agent_framework import ToolRateLimitMiddleware
from tests.agent_framework.scripted import (
    OfflineChatClient,
    agent_of,
    both_ways,
    calls,
    last_results,
    limits,
    recorded,
    rejections,
    remaining,
    run,
)
from tests.clocks import FakeClock


class Gate(FunctionMiddleware):
    """Lets calls wait before or after the middleware inside it."""

    def __init__(self, *, before: bool = False, after: bool = False) -> None:
        self.arrived = asyncio.Event()
        self.before = before
        self.after = after

    async def process(self, context: FunctionInvocationContext, call_next: Any) -> None:
        if self.before:
            await self.wait()
        await call_next()
        if self.after:
            await self.wait()

    async def wait(self) -> None:
        self.arrived.set()
        await asyncio.Event().wait()


async def cancel_once(arrived: asyncio.Event, task: asyncio.Task[Any]) -> None:
    """Cancels a task when it has arrived somewhere, and sees it cancelled."""
    await asyncio.wait_for(arrived.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def assert_nothing_is_held(limiter: ToolRateLimitMiddleware, tokens: int) -> None:
    """What is left is left for others, and nothing beyond it."""
    assert remaining(limiter) == tokens
    lookup = recorded()
    client = OfflineChatClient(calls("lookup", tokens + 1), "done")
    response = await asyncio.wait_for(run(agent_of(client, lookup, middleware=[limiter])), 30)
    assert response.text == "done"
    assert len(lookup.started) == tokens
    assert len(rejections(last_results(client))) == 1


@both_ways
async def test_cancelled_before_admission_spends_nothing(clock: FakeClock, *, stream: bool) -> None:
    lookup, gate = recorded(), Gate(before=True)
    limiter = ToolRateLimitMiddleware(limits(burst=3), clock=clock)
    client = OfflineChatClient(calls("lookup", 2), "never said")
    agent = agent_of(client, lookup, middleware=[gate, limiter])
    await cancel_once(gate.arrived, asyncio.ensure_future(run(agent, stream=stream)))
    assert lookup.started == []
    await assert_nothing_is_held(limiter, 3)


async def test_a_call_whose_task_is_cancelled_before_it_starts_spends_nothing(
    clock: FakeClock,
) -> None:
    lookup = recorded()
    limiter = ToolRateLimitMiddleware(limits(burst=3), clock=clock)
    task = asyncio.ensure_future(invoke(limiter, lookup.tool.invoke))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert lookup.started == []
    await assert_nothing_is_held(limiter, 3)


async def invoke(limiter: ToolRateLimitMiddleware, tool: Callable[..., Any]) -> Any:
    """One call through the framework's pipeline."""
    context = FunctionInvocationContext(function=recorded().tool, arguments={"call": "c1"})
    return await FunctionMiddlewarePipeline(limiter).execute(
        context, lambda inner: tool(arguments=inner.arguments)
    )


async def test_cancelled_during_admission_spends_one_token_and_is_cancelled(
    clock: FakeClock,
) -> None:
    asked = 0

    def cancelling_clock() -> float:
        # An admission awaits nothing, so only its clock can cancel the task amid it.
        nonlocal asked
        asked += 1
        if asked == 2:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        return clock()

    async def take_a_while(_call: str) -> None:
        await asyncio.sleep(0)
        pytest.fail("went on after it was cancelled")

    lookup = recorded(act=take_a_while)
    limiter = ToolRateLimitMiddleware(limits(burst=3), clock=cancelling_clock)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(invoke(limiter, lookup.tool.invoke))
    assert asked == 2
    assert lookup.started == ["c1"]
    await assert_nothing_is_held(limiter, 2)


@both_ways
async def test_cancelled_while_the_tool_runs_spends_one_token_a_call(
    clock: FakeClock, *, stream: bool
) -> None:
    arrived = asyncio.Event()
    cancelled: list[str] = []

    async def never_end(call: str) -> None:
        if call == "c2":
            arrived.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(call)
            raise

    lookup = recorded(act=never_end)
    limiter = ToolRateLimitMiddleware(limits(burst=5), clock=clock)
    client = OfflineChatClient(calls("lookup", 2), "never said")
    agent = agent_of(client, lookup, middleware=[limiter])
    await cancel_once(arrived, asyncio.ensure_future(run(agent, stream=stream)))
    assert sorted(cancelled) == ["c1", "c2"]
    await assert_nothing_is_held(limiter, 3)


async def test_cancelled_after_the_tool_spends_one_token(clock: FakeClock) -> None:
    lookup, gate = recorded(), Gate(after=True)
    limiter = ToolRateLimitMiddleware(limits(burst=3), clock=clock)
    client = OfflineChatClient(calls("lookup", 1), "never said")
    agent = agent_of(client, lookup, middleware=[gate, limiter])
    await cancel_once(gate.arrived, asyncio.ensure_future(run(agent)))
    assert lookup.started == ["c1"]
    await assert_nothing_is_held(limiter, 2)


async def test_a_tool_that_times_out_has_spent_its_token(clock: FakeClock) -> None:
    lookup = recorded(act=lambda _call: asyncio.wait_for(asyncio.Event().wait(), 0))
    limiter = ToolRateLimitMiddleware(limits(burst=3), clock=clock)
    client = OfflineChatClient(calls("lookup", 1), "done")
    await run(agent_of(client, lookup, middleware=[limiter]))
    assert last_results(client)["c1"].exception is not None
    await assert_nothing_is_held(limiter, 2)


async def test_cancelled_while_a_rejection_is_worded_spends_nothing(clock: FakeClock) -> None:
    arrived = asyncio.Event()

    async def on_rejected(context: FunctionInvocationContext, decision: Decision) -> None:
        arrived.set()
        await asyncio.Event().wait()

    lookup = recorded()
    limiter = ToolRateLimitMiddleware(limits(), on_rejected=on_rejected, clock=clock)
    client = OfflineChatClient(calls("lookup", 2), "never said")
    agent = agent_of(client, lookup, middleware=[limiter])
    await cancel_once(arrived, asyncio.ensure_future(run(agent)))
    assert lookup.started == ["c1"]
    assert remaining(limiter) == 0
    clock.advance(1)
    assert remaining(limiter) == 1


async def test_a_stream_that_nobody_reads_to_its_end_spends_what_it_started(
    clock: FakeClock,
) -> None:
    lookup = recorded()
    limiter = ToolRateLimitMiddleware(limits(burst=5), clock=clock)
    client = OfflineChatClient(calls("lookup", 2), calls("lookup", 2, "d"), "never said")
    agent = agent_of(client, lookup, middleware=[limiter])
    stream = agent.run("go", stream=True)
    async for update in stream:
        if any(content.type == "function_result" for content in update.contents):
            break
    assert len(lookup.started) == 2
    await assert_nothing_is_held(limiter, 3)
