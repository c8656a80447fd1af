"""What becomes of decisions, turns and limiters that nobody holds any more."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import sys
import threading
import tracemalloc
import warnings
import weakref
from asyncio import Future
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from callgate import Decision, Limiter, ToolRateLimit

from .clocks import FakeClock

LONG = 30.0
"""Seconds after which a call would be rejected, and a test hung: never reached where all is well."""

DROPPED = "the decision on a call of tool 'search' was dropped"


@pytest.fixture
def limiter() -> Limiter:
    """One call may run at a time."""
    return Limiter({"search": ToolRateLimit(1e6, 1000, max_concurrent=1, max_wait=LONG)})


def is_free(limiter: Limiter) -> bool:
    with limiter.try_acquire("search") as decision:
        return decision.admitted


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BaseException | None]]:
    """What was raised where nobody takes it."""
    seen: list[BaseException | None] = []

    def hook(hooked: sys.UnraisableHookArgs) -> None:
        seen.append(hooked.exc_value)

    monkeypatch.setattr(sys, "unraisablehook", hook)
    yield seen
    monkeypatch.undo()


def test_a_decision_that_is_dropped_releases_and_warns(limiter: Limiter) -> None:
    decision = limiter.try_acquire("search")
    assert not is_free(limiter)
    with pytest.warns(RuntimeWarning, match=DROPPED):
        del decision
    assert is_free(limiter)


def test_one_that_is_in_a_cycle_does_so_when_that_is_collected(limiter: Limiter) -> None:
    cycle: list[Any] = [limiter.try_acquire("search")]
    cycle.append(cycle)
    del cycle
    with pytest.warns(RuntimeWarning, match=DROPPED):
        gc.collect()
    assert is_free(limiter)


def test_one_that_holds_nothing_is_dropped_in_silence(limiter: Limiter) -> None:
    other = Limiter({"search": ToolRateLimit(1, 1)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert other.try_acquire("search")
        with limiter.try_acquire("search"):
            assert not limiter.try_acquire("search")
        assert limiter.try_acquire("other")


def fails() -> None:
    raise KeyError("mine")


def drops_as_it_raises(limiter: Limiter) -> None:
    # The decision is on the frame's stack alone, and goes while the exception passes.
    print(limiter.try_acquire("search"), fails())  # type: ignore[func-returns-value]  # noqa: T201


@pytest.mark.parametrize("action", ["always", "error", "ignore"])
def test_an_exception_that_drops_a_decision_is_not_lost(
    limiter: Limiter, unraisable: list[BaseException | None], action: Any
) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter(action)
        with pytest.raises(KeyError, match="mine") as raised:
            drops_as_it_raises(limiter)
    assert raised.value.__context__ is None
    assert len(warned) == (action == "always")
    # Turned into an error, the warning has nobody to go to.
    assert [type(error) for error in unraisable] == [RuntimeWarning] * (action == "error")
    assert is_free(limiter)


@pytest.mark.parametrize("action", ["ignore", "error"])
@pytest.mark.parametrize("where", ["thread", "loop"])
def test_an_exception_that_drops_a_decision_lets_who_waits_go_on(
    limiter: Limiter, unraisable: list[BaseException | None], where: str, action: Any
) -> None:
    served: list[bool] = []
    begun = threading.Event()

    async def in_loop() -> None:
        task = asyncio.create_task(limiter.acquire("search"))
        await asyncio.sleep(0)
        begun.set()
        with await task as decision:
            served.append(decision.admitted)

    def in_thread() -> None:
        begun.set()
        with limiter.acquire_sync("search") as decision:
            served.append(decision.admitted)

    thread = threading.Thread(
        target=in_thread if where == "thread" else lambda: asyncio.run(in_loop())
    )

    def fails_when_it_waits() -> None:
        thread.start()
        assert begun.wait(LONG)
        thread.join(0.05)
        assert thread.is_alive()
        raise KeyError("mine")

    def drops() -> None:
        print(limiter.try_acquire("search"), fails_when_it_waits())  # type: ignore[func-returns-value]  # noqa: T201

    with warnings.catch_warnings():
        warnings.simplefilter(action)
        with pytest.raises(KeyError, match="mine"):
            drops()
    thread.join(LONG)
    assert served == [True]
    assert [type(error) for error in unraisable] == [RuntimeWarning] * (action == "error")


def test_an_exception_out_of_the_block_passes_and_releases(limiter: Limiter) -> None:
    with pytest.raises(KeyError), limiter.try_acquire("search"):
        fails()
    assert is_free(limiter)


def test_a_decision_ends_once_and_then_runs_no_other_call(limiter: Limiter) -> None:
    with limiter.try_acquire("search") as decision:
        with decision as same:
            assert same is decision
        # It has ended, and what comes of it now changes nothing.
        with limiter.try_acquire("search") as other:
            assert other
            with pytest.raises(RuntimeError, match="ask for another decision"), decision:
                raise AssertionError
            assert not is_free(limiter)
    assert is_free(limiter)


def test_a_rejected_decision_may_be_entered(limiter: Limiter) -> None:
    with limiter.try_acquire("search"):
        with limiter.try_acquire("search") as rejected, rejected:
            assert not rejected
        with rejected:
            assert not is_free(limiter)
    assert is_free(limiter)


def pickled(decision: Decision) -> Any:
    return pickle.loads(pickle.dumps(decision))  # noqa: S301


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_of_a_decision_holds_nothing(
    limiter: Limiter, again: Callable[[Decision], Decision]
) -> None:
    with limiter.try_acquire("search") as decision:
        other = again(decision)
        assert other is not decision
        assert repr(other) == repr(decision)
        with other:
            pass
        del other
        assert not is_free(limiter)
    assert is_free(limiter)


def test_a_result_that_nobody_took_warns_and_releases(limiter: Limiter) -> None:
    async def main() -> None:
        with limiter.try_acquire("search"):
            task = asyncio.create_task(limiter.acquire("search"))
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert task.done()

    with pytest.warns(RuntimeWarning, match=DROPPED):
        asyncio.run(main())
    assert is_free(limiter)


def test_a_limiter_may_be_let_go_while_calls_wait(clock: FakeClock) -> None:
    limiters = [Limiter({"search": ToolRateLimit(1000, 1, max_wait=LONG)})]
    gone = weakref.ref(limiters[0]) if hasattr(limiters[0], "__weakref__") else None
    assert limiters[0].try_acquire("search")

    async def main() -> list[bool]:
        tasks = [asyncio.create_task(limiters[0].acquire("search")) for _ in range(5)]
        await asyncio.sleep(0)
        limiters.clear()
        gc.collect()
        return [decision.admitted for decision in await asyncio.gather(*tasks)]

    assert asyncio.run(main()) == [True] * 5
    assert gone is None or gone() is None


def test_a_cycle_of_a_limiter_its_clock_and_a_call_that_waits_is_collected() -> None:
    class Clock:
        def __init__(self) -> None:
            self.limiter: Limiter | None = None
            self.call: Any = None

        def __call__(self) -> float:
            return 1000.0

    clocks = [Clock()]
    clock = clocks[0]
    clock.limiter = Limiter({"search": ToolRateLimit(1, 1, max_wait=LONG)}, clock=clock)
    assert clock.limiter.try_acquire("search")
    clock.call = clock.limiter.acquire("search")

    async def step() -> None:
        clocks[0].call.send(None)

    asyncio.run(step())
    gone = weakref.ref(clock)
    clocks.clear()
    del clock
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("how", ["served", "cancelled", "refused"])
def test_ten_thousand_calls_that_wait_leave_nothing_behind(how: str) -> None:
    limiter = Limiter({"search": ToolRateLimit(200_000 if how == "served" else 100, 1)})
    tool = "".join(["sea", "rch"])
    max_wait = 0.01 if how == "refused" else LONG

    async def many() -> None:
        calls = (limiter.acquire(tool, max_wait=max_wait) for _ in range(1000))
        tasks = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0)
        if how == "cancelled":
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def held() -> tuple[int, int, int, int]:
        gc.collect()
        things = gc.get_objects()
        futures = sum(isinstance(thing, Future) for thing in things)
        traced, _ = tracemalloc.get_traced_memory()
        return len(things), futures, sys.getrefcount(tool), traced

    async def main() -> None:
        # What asyncio still has of the last thousand is there before and after.
        await many()
        before = held()
        for _ in range(10):
            await many()
        things, futures, referred, traced = (
            after - there for after, there in zip(held(), before, strict=True)
        )
        assert things < 1000
        assert futures <= 10
        assert referred <= 10
        # Sets and lists of asyncio's are now and then larger; an object for each call would be 500 kB.
        assert traced < 250_000

    tracemalloc.start()
    try:
        asyncio.run(main())
    finally:
        tracemalloc.stop()
