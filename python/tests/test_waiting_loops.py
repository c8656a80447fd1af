"""Calls that wait in event loops: several of them, stopped ones, closed ones, and what loops are left with."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
from asyncio import AbstractEventLoop, Task
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from callgate import Decision, Limiter, ToolRateLimit

from .clocks import FakeClock
from .running import run_program

PROGRAMS = Path(__file__).parent / "programs"
LONG = 30.0
"""Seconds after which a call would be rejected, and a test hung: never reached where all is well."""

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs it in a loop of its own, which must come to its end."""

    async def guarded() -> T:
        return await asyncio.wait_for(coroutine, LONG)

    return asyncio.run(guarded())


def drained(clock: FakeClock | None = None, rate: float = 1) -> Limiter:
    limiter = Limiter({"search": ToolRateLimit(rate, 1, max_wait=LONG)}, clock=clock)
    assert limiter.try_acquire("search")
    return limiter


async def waiting(limiter: Limiter, number: int) -> list[Task[Decision]]:
    """Tasks that have got their places."""
    tasks = [asyncio.create_task(limiter.acquire("search")) for _ in range(number)]
    await asyncio.sleep(0)
    return tasks


@pytest.fixture
def loop() -> Iterator[AbstractEventLoop]:
    """A loop that a test runs, stops and closes as it likes."""
    loop = asyncio.new_event_loop()
    # What asyncio says of each task that is dropped while it waits, for whatever it waits.
    loop.set_exception_handler(lambda _loop, _context: None)
    yield loop
    loop.close()
    gc.collect()


@pytest.mark.skipif(sys.platform == "win32", reason="uvloop is not made for it")
@pytest.mark.parametrize("kind", ["asyncio", "uvloop", "anyio"])
def test_r12_one_limiter_serves_loops_one_after_another_and_at_once(kind: str) -> None:
    said = json.loads(run_program(PROGRAMS / "loops.py", kind))
    assert said == {
        "abandoned": [10, 10],
        "after": [50, 50],
        "threads": [50, 50],
        "group": 50,
        "in_bound": True,
        "left": True,
    }


def in_another_loop(limiter: Limiter) -> Decision:
    return run(limiter.acquire("search"))


def in_a_thread(limiter: Limiter) -> Decision:
    return limiter.acquire_sync("search")


@pytest.mark.parametrize("ask", [in_another_loop, in_a_thread])
def test_r12_who_waits_in_a_closed_loop_holds_no_place(
    clock: FakeClock, loop: AbstractEventLoop, ask: Callable[[Limiter], Decision]
) -> None:
    # The clock stands, so that nobody is ever passed over for being late.
    limiter = drained(clock)
    tasks = loop.run_until_complete(waiting(limiter, 20))
    loop.close()
    clock.advance(1)
    assert ask(limiter)
    assert not any(task.done() for task in tasks)


def test_r12_a_loop_that_closes_with_a_thread_behind_it_holds_that_up_once_and_not_for_each() -> (
    None
):
    limiter = Limiter({"search": ToolRateLimit(1000, 1000, max_concurrent=1)})
    running = limiter.try_acquire("search")
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _loop, _context: None)

    async def wait() -> list[Task[Decision]]:
        calls = (limiter.acquire("search", max_wait=LONG) for _ in range(1000))
        tasks = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0)
        return tasks

    tasks = loop.run_until_complete(wait())
    with running:
        loop.close()
    # At 50 ms for each of them it would be refused.
    with limiter.acquire_sync("search", max_wait=LONG) as decision:
        assert decision
    del tasks
    gc.collect()


def test_a_waiter_whose_loop_is_gone_gives_its_place_up(clock: FakeClock) -> None:
    limiter = drained(clock)
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _loop, _context: None)
    loop.run_until_complete(waiting(limiter, 3))
    loop.close()
    del loop
    gc.collect()
    clock.advance(1)
    # It does not wait itself, so nothing but the end of the tasks can have made room.
    assert limiter.try_acquire("search")


def test_a_task_that_is_dropped_while_it_waits_gives_its_place_up(clock: FakeClock) -> None:
    limiter = drained(clock)
    calls = [limiter.acquire("search")]
    loop = asyncio.new_event_loop()

    async def step() -> None:
        # As a task does, but nobody holds it.
        calls[0].send(None)

    loop.run_until_complete(step())
    clock.advance(1)
    assert not limiter.try_acquire("search")
    calls.clear()
    assert limiter.try_acquire("search")
    loop.close()


class Blocked:
    """A loop in a thread, in which calls wait, and which is then blocked until it is let go on."""

    def __init__(self, limiter: Limiter, number: int) -> None:
        self._limiter, self._number = limiter, number
        self._blocked, self._go_on = threading.Event(), threading.Event()
        self.decisions: list[Decision] = []
        self._thread = threading.Thread(target=lambda: run(self._main()))

    def __enter__(self) -> None:
        self._thread.start()
        assert self._blocked.wait(LONG)

    def __exit__(self, *_error: object) -> None:
        self._go_on.set()
        self._thread.join()

    async def _main(self) -> None:
        tasks = await waiting(self._limiter, self._number)
        self._blocked.set()
        assert self._go_on.wait(LONG)
        self.decisions = await asyncio.gather(*tasks)


@pytest.mark.parametrize("number", [1, 3])
def test_who_waits_behind_a_blocked_loop_is_served_before_it_goes_on(number: int) -> None:
    limiter = drained(rate=200)
    blocked = Blocked(limiter, number)
    with blocked:
        assert in_a_thread(limiter)
        assert in_another_loop(limiter)
        found: list[Decision] = []
        thread = threading.Thread(target=lambda: found.append(in_a_thread(limiter)))
        thread.start()
        assert in_another_loop(limiter)
        thread.join()
        assert all(found)
        assert not blocked.decisions
    assert [decision.admitted for decision in blocked.decisions] == [True] * number


def test_who_waits_behind_a_stopped_loop_is_served_and_so_is_it_when_it_comes_back(
    loop: AbstractEventLoop,
) -> None:
    limiter = drained(rate=200)
    tasks = loop.run_until_complete(waiting(limiter, 2))
    assert in_a_thread(limiter)
    assert in_another_loop(limiter)
    assert not any(task.done() for task in tasks)
    decisions = loop.run_until_complete(asyncio.wait_for(asyncio.gather(*tasks), LONG))
    assert all(decisions)


def test_who_comes_back_to_a_stopped_loop_is_before_those_who_came_later(
    loop: AbstractEventLoop, clock: FakeClock
) -> None:
    limiter = drained(clock, rate=100)
    first = loop.run_until_complete(waiting(limiter, 1))
    other = asyncio.new_event_loop()
    second = other.run_until_complete(waiting(limiter, 1))
    clock.advance(1)
    assert loop.run_until_complete(first[0])
    assert not second[0].done()
    clock.advance(1)
    assert other.run_until_complete(second[0])
    other.close()


def test_a_loop_in_which_some_wait_long_keeps_few_timers() -> None:
    limiter = Limiter({"slow": ToolRateLimit(0.001, 1), "search": ToolRateLimit(2000, 1)})
    assert limiter.try_acquire("slow")

    async def main() -> int:
        loop: Any = asyncio.get_running_loop()
        slow = asyncio.create_task(limiter.acquire("slow", max_wait=3600))
        for _ in range(100):
            assert await limiter.acquire("search", max_wait=LONG)
        slow.cancel()
        return len(loop._scheduled)

    # What is left is that of the one that waits, and of the guard, and not one for each grant.
    assert run(main()) <= 3


async def test_calls_wait_under_each_of_asyncios_own_ways() -> None:
    limiter = Limiter({"search": ToolRateLimit(2000, 1, max_wait=LONG)})

    def ask() -> Coroutine[Any, Any, Decision]:
        return limiter.acquire("search")

    assert await asyncio.create_task(ask())
    assert all(await asyncio.gather(*(ask() for _ in range(20))))
    assert await asyncio.wait_for(ask(), LONG)
    assert await asyncio.shield(ask())
    done, pending = await asyncio.wait([asyncio.ensure_future(ask()) for _ in range(5)])
    assert (len(done), len(pending)) == (5, 0)
    assert [bool(await call) for call in asyncio.as_completed([ask() for _ in range(5)])] == (
        [True] * 5
    )
    assert asyncio.iscoroutinefunction(limiter.acquire)


async def test_a_time_out_ends_the_wait_and_gives_the_place_up(clock: FakeClock) -> None:
    limiter = drained(clock)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(limiter.acquire("search"), 0.01)
    if sys.version_info >= (3, 11):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await limiter.acquire("search")
    clock.advance(1)
    assert limiter.try_acquire("search")


def test_waiting_needs_a_loop_of_asyncios() -> None:
    limiter = drained()
    call = limiter.acquire("search")
    with pytest.raises(RuntimeError, match="no running event loop"):
        call.send(None)


@pytest.mark.parametrize("module", ["asyncio", "uvloop"])
def test_a_waiter_is_told_from_another_thread(module: str) -> None:
    limiter = Limiter({"search": ToolRateLimit(1000, 1000, max_concurrent=1)})
    loop = pytest.importorskip(module, reason="it is not made for this system").new_event_loop()

    async def wait() -> bool:
        with await limiter.acquire("search", max_wait=LONG) as decision:
            return decision.admitted

    for _ in range(50):
        running = limiter.try_acquire("search")
        task = loop.create_task(wait())
        loop.run_until_complete(asyncio.sleep(0))
        end = threading.Thread(target=running.__exit__, args=(None, None, None))
        end.start()
        assert loop.run_until_complete(task)
        end.join()
    loop.close()
