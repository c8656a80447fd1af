"""One middleware in many event loops: one after another, at once in threads, of other makers.

A limiter belongs to no loop. The bucket is shared over all of them and no loop refills it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import pytest
from agent_framework import FunctionInvocationContext
from agent_framework._middleware import FunctionMiddlewarePipeline

from callgate import ToolRateLimit
from callgate.agent_framework import ToolRateLimitMiddleware
from tests.agent_framework.scripted import (
    OfflineChatClient,
    Recorded,
    agent_of,
    calls,
    last_results,
    limits,
    recorded,
    rejections,
    remaining,
    run,
)
from tests.clocks import FakeClock
from tests.running import THREADS, hammer, run_program

MODULE_CLOCK = FakeClock(1000.3)
MODULE_LEVEL = ToolRateLimitMiddleware({"lookup": ToolRateLimit(20, 5)}, clock=MODULE_CLOCK)
"""Made at import, where no loop runs."""


async def run_once(limiter: ToolRateLimitMiddleware, lookup: Recorded, count: int) -> int:
    """Runs an agent that calls its tool so many times; counts the calls that were rejected."""
    client = OfflineChatClient(calls("lookup", count), "done")
    response = await run(agent_of(client, lookup, middleware=[limiter]))
    assert response.text == "done"
    found = last_results(client)
    assert len(found) == count
    return len(rejections(found))


def stuck_after(count: int) -> tuple[Recorded, asyncio.Event]:
    """A tool whose body never ends, and what is set when so many calls are in it."""
    full = asyncio.Event()

    async def never_end(_call: str) -> None:
        if len(stuck.started) == count:
            full.set()
        await asyncio.Event().wait()

    stuck = recorded(act=never_end)
    return stuck, full


# --- one after another ---------------------------------------------------------------------------


def test_r12_a_module_level_limiter_serves_three_runs_in_turn_the_first_abandoned() -> None:
    lookup = recorded()
    stuck, full = stuck_after(5)

    async def abandoned() -> None:
        runs = [asyncio.ensure_future(run_once(MODULE_LEVEL, stuck, 1)) for _ in range(50)]
        await full.wait()
        assert not all(task.done() for task in runs)
        # Leaves with runs under way; `asyncio.run` cancels them and closes the loop.

    async def fifty() -> int:
        return sum(await asyncio.gather(*(run_once(MODULE_LEVEL, lookup, 1) for _ in range(50))))

    asyncio.run(abandoned())
    gc.collect()
    # What the first run spent stays spent, and the runs that went with it hold nothing.
    assert len(stuck.started) == 5
    assert remaining(MODULE_LEVEL) == 0
    for elapsed, admitted in ((0.1, 2), (10.0, 5)):
        MODULE_CLOCK.advance(elapsed)
        lookup.started.clear()
        assert asyncio.run(fifty()) == 50 - admitted
        assert len(lookup.started) == admitted


def test_r12_a_loop_that_is_stopped_and_thrown_away_holds_nothing() -> None:
    clock = FakeClock()
    limiter = ToolRateLimitMiddleware(limits(burst=3), clock=clock)
    stuck, full = stuck_after(2)
    loop = asyncio.new_event_loop()
    task = loop.create_task(run_once(limiter, stuck, 2))
    loop.run_until_complete(full.wait())
    # The loop stands still while another one uses the limiter.
    lookup = recorded()
    assert asyncio.run(run_once(limiter, lookup, 2)) == 1
    assert lookup.started == ["c1"]
    # Then it is wound up, as asyncio asks for.
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
    clock.advance(1)
    assert asyncio.run(run_once(limiter, lookup, 2)) == 1


# --- at once in threads --------------------------------------------------------------------------


def in_threads(work: Callable[[int], Coroutine[Any, Any, int]]) -> int:
    """Runs a loop in each of several threads, from the same moment on; sums up what they return."""
    return hammer(lambda number: asyncio.run(work(number)))


def invoker(limiter: ToolRateLimitMiddleware, lookup: Recorded) -> Callable[[], Awaitable[bool]]:
    """A call through the framework's pipeline, which says whether its body ran."""
    pipeline = FunctionMiddlewarePipeline(limiter)

    async def body(_context: FunctionInvocationContext) -> bool:
        await asyncio.sleep(0)
        return True

    async def invoke() -> bool:
        context = FunctionInvocationContext(function=lookup.tool, arguments={"call": "c"})
        return await pipeline.execute(context, body) is True

    return invoke


def test_r12_four_threads_with_four_loops_make_100_000_calls_and_get_exactly_the_burst() -> None:
    limiter = ToolRateLimitMiddleware(limits(burst=10_000), clock=FakeClock())
    invoke = invoker(limiter, recorded())

    async def work(_number: int) -> int:
        ran = 0
        for _ in range(250):
            ran += sum(await asyncio.gather(*(invoke() for _ in range(100))))
        return ran

    assert in_threads(work) == 10_000
    assert remaining(limiter) == 0


def test_r12_four_threads_with_four_loops_get_exactly_what_time_brings() -> None:
    clock = FakeClock()
    limiter = ToolRateLimitMiddleware(limits(rate=1000, burst=2000), clock=clock)
    invoke = invoker(limiter, recorded())

    async def work(number: int) -> int:
        ran = 0
        for _ in range(100):
            ran += sum(await asyncio.gather(*(invoke() for _ in range(100))))
            if number == 0:
                clock.now += 1 / 64
        return ran

    admitted = in_threads(work)
    # The bucket is never full on the way, so nothing is lost. What is left is drawn here.
    while limiter.limiter.try_acquire("lookup"):
        admitted += 1
    assert admitted == 2000 + int(100 / 64 * 1000)


def test_r12_on_the_real_clock_four_loops_stay_within_the_bound() -> None:
    before = time.monotonic()
    limiter = ToolRateLimitMiddleware(limits(rate=5000, burst=50))
    invoke = invoker(limiter, recorded())

    async def work(_number: int) -> int:
        return sum([await invoke() for _ in range(5000)])

    admitted = in_threads(work)
    assert 50 < admitted <= 50 + 5000 * (time.monotonic() - before)


def test_r12_agents_in_four_loops_at_once_share_one_quota() -> None:
    limiter = ToolRateLimitMiddleware(limits(burst=33), clock=FakeClock())
    lookup = recorded(act=lambda _call: asyncio.sleep(0))

    async def work(_number: int) -> int:
        return sum([await run_once(limiter, lookup, 10) for _ in range(5)])

    assert in_threads(work) == THREADS * 50 - 33
    assert len(lookup.started) == 33


# --- of other makers -----------------------------------------------------------------------------


async def twice(limiter: ToolRateLimitMiddleware) -> list[int]:
    """Runs agents beside each other, and then one more."""
    together = await asyncio.gather(*(run_once(limiter, recorded(), 3) for _ in range(4)))
    return [sum(together), await run_once(limiter, recorded(), 1)]


def test_r12_it_works_under_uvloop_too() -> None:
    uvloop = pytest.importorskip("uvloop", reason="uvloop is not made for this system")
    limiter = ToolRateLimitMiddleware(limits(burst=5), clock=FakeClock())
    for burst in (5, 0):
        loop = uvloop.new_event_loop()
        try:
            assert loop.run_until_complete(twice(limiter)) == [12 - burst, 1]
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
    # The same one, under asyncio's own loop afterwards.
    assert asyncio.run(twice(limiter)) == [12, 1]


def test_r12_it_works_under_anyio_too() -> None:
    limiter = ToolRateLimitMiddleware(limits(burst=5), clock=FakeClock())
    lookup = recorded()
    rejected: list[int] = []

    async def one() -> None:
        rejected.append(await run_once(limiter, lookup, 3))

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(one)

    anyio.run(main)
    assert sum(rejected) == 12 - 5
    assert len(lookup.started) == 5


async def test_a_cancelled_anyio_scope_holds_nothing(clock: FakeClock) -> None:
    limiter = ToolRateLimitMiddleware(limits(burst=3), clock=clock)
    stuck, full = stuck_after(2)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(run_once, limiter, stuck, 2)
            await full.wait()
            scope.cancel()
    assert scope.cancelled_caught
    assert remaining(limiter) == 1


# --- after a fork --------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_r19_agents_run_in_forked_children_and_count_apart_from_their_parent() -> None:
    program = Path(__file__).parent / "programs" / "fork.py"
    # From 3.12 on Python warns of any fork of a process that has threads.
    said = json.loads(run_program(program, warnings="ignore"))
    assert said == {"before": 1, "children": ["2"] * 20, "parent": 2}
