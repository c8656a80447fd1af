"""What calls that wait are given and answer: bad values, clocks, reloads and pauses."""

from __future__ import annotations

import asyncio
import math
import time
from asyncio import Task
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from callgate import ConfigError, Decision, Limiter, ToolRateLimit

from .clocks import FakeClock

LONG = 30.0
"""Seconds after which a call would be rejected, and a test hung: never reached where all is well."""

DAY = 86_400


class Waits:
    """A call that may wait, in a loop or in a thread."""

    def __init__(self, how: str) -> None:
        self._how = how

    def __call__(self, limiter: Limiter, tool: Any = "search", **given: Any) -> Decision:
        if self._how == "thread":
            return limiter.acquire_sync(tool, **given)

        async def main() -> Decision:
            return await asyncio.wait_for(limiter.acquire(tool, **given), LONG)

        return asyncio.run(main())


@pytest.fixture(params=["thread", "loop"])
def wait(request: pytest.FixtureRequest) -> Waits:
    """How a call waits."""
    return Waits(request.param)


def drained(clock: Callable[[], float], rate: float = 1, burst: int = 1, **more: Any) -> Limiter:
    limiter = Limiter({"search": ToolRateLimit(rate, burst, **more)}, clock=clock)
    assert limiter.try_acquire("search", cost=burst)
    return limiter


async def waiting(limiter: Limiter, number: int, **given: Any) -> list[Task[Decision]]:
    """Tasks that have got their places, in order."""
    tasks = [asyncio.create_task(limiter.acquire("search", **given)) for _ in range(number)]
    await asyncio.sleep(0)
    return tasks


async def ends(task: Task[Decision]) -> Decision:
    return await asyncio.wait_for(task, LONG)


# --- values --------------------------------------------------------------------------------------


BAD_TIMES: list[Any] = [
    *(True, False, "1", b"1", [], 1j, object),
    *(math.nan, math.inf, -math.inf, -1, -1e-9, 86_401, 86_400.1, 10**400),
]


@pytest.mark.parametrize("max_wait", BAD_TIMES, ids=str)
def test_r04_a_bad_max_wait_is_refused_before_anything_changes(
    wait: Waits, clock: FakeClock, max_wait: Any
) -> None:
    limiter = Limiter({"search": ToolRateLimit(1, 2)}, clock=clock)
    with pytest.raises(ConfigError, match=r"max_wait must be .* 86,400") as refused:
        wait(limiter, max_wait=max_wait)
    assert isinstance(refused.value, ValueError)
    with pytest.raises(ConfigError, match=r"max_wait must be .* 86,400"):
        limiter.limit("search", max_wait=max_wait)
    assert limiter.snapshot()["search"].remaining == 2


@pytest.mark.parametrize("max_wait", [0, 0.0, -0.0, 1e-12], ids=repr)
def test_r16_a_max_wait_of_nothing_is_try_acquire(
    wait: Waits, clock: FakeClock, max_wait: float
) -> None:
    limiter = drained(clock, max_wait=LONG)
    rejected = wait(limiter, max_wait=max_wait)
    assert repr(rejected) == repr(limiter.try_acquire("search"))
    clock.advance(1)
    assert wait(limiter, max_wait=max_wait)


@pytest.mark.parametrize("max_wait", [None, DAY, float(DAY), 1, 0.5], ids=repr)
def test_a_max_wait_of_none_is_the_limits_own_and_others_are_taken(
    wait: Waits, clock: FakeClock, max_wait: float | None
) -> None:
    limiter = drained(clock, rate=100, max_wait=0.5)
    real = Limiter({"search": ToolRateLimit(100, 1, max_wait=0.5)})
    assert real.try_acquire("search")
    assert wait(real, max_wait=max_wait)
    limiter.pause("search", 1.5)
    # Where it may wait for as long as the pause lasts, it would.
    if max_wait != DAY:
        assert wait(limiter, max_wait=max_wait).reason == "paused"


@pytest.mark.parametrize(
    "cost", [0, -1, True, "1", None, math.nan, math.inf, 1e-9, 1.0, -0.0], ids=repr
)
def test_r04_a_bad_cost_is_refused_at_once_though_it_might_wait(
    wait: Waits, clock: FakeClock, cost: Any
) -> None:
    limiter = drained(clock, max_wait=LONG)
    with pytest.raises(ConfigError, match="cost must be a whole number of at least 1"):
        wait(limiter, cost=cost, max_wait=LONG)
    with pytest.raises(ConfigError, match="cost must be a whole number of at least 1"):
        limiter.limit("search", cost=cost)
    clock.advance(1)
    assert limiter.try_acquire("search")


@pytest.mark.parametrize("given", [{"tool": 7}, {"tool": None}, {"tenant": 1.5}, {"tenant": b"x"}])
def test_r04_other_bad_values_are_refused_too(
    wait: Waits, clock: FakeClock, given: dict[str, Any]
) -> None:
    limiter = drained(clock, max_wait=LONG)
    with pytest.raises(ConfigError):
        wait(limiter, **given)
    given = dict(given)
    with pytest.raises(ConfigError):
        limiter.limit(given.pop("tool", "search"), **given)


async def test_what_is_wrong_with_a_call_is_raised_where_it_is_awaited(clock: FakeClock) -> None:
    limiter = drained(clock)
    bad: Any = "soon"
    call = limiter.acquire("search", max_wait=bad)
    with pytest.raises(ConfigError, match="max_wait must be"):
        await call


@pytest.mark.parametrize("seconds", [*BAD_TIMES, 0, 0.0, None], ids=str)
def test_a_bad_time_to_pause_is_refused_before_anything_changes(
    clock: FakeClock, seconds: Any
) -> None:
    limiter = Limiter({"search": ToolRateLimit(1, 1)}, clock=clock)
    with pytest.raises(ConfigError, match="seconds must be"):
        limiter.pause("search", seconds)
    assert limiter.try_acquire("search")


def test_r05_a_cost_above_the_burst_ends_at_once_and_touches_nothing(
    wait: Waits, clock: FakeClock
) -> None:
    limiter = Limiter(
        {
            "search": ToolRateLimit.per_minute(100, burst=100),
            "all": ToolRateLimit(1, 10_000, tools="*", max_wait=DAY),
        },
        clock=clock,
    )
    # The clock stands: it would wait for all of the time.
    rejected = wait(limiter, cost=200, max_wait=DAY)
    assert (rejected.reason, rejected.limit, rejected.retry_after) == ("cost", "search", None)
    assert limiter.snapshot()["search"].remaining == 100
    assert wait(limiter, cost=100, max_wait=DAY)
    # Behind others, too.
    assert wait(limiter, cost=101, max_wait=DAY).reason == "cost"


# --- clocks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [2, 10])
def test_r16_a_wait_ends_though_the_clock_stands_still(
    wait: Waits, clock: FakeClock, rate: float
) -> None:
    limiter = drained(clock, rate=rate)
    start = time.monotonic()
    rejected = wait(limiter, max_wait=0.6)
    # A turn that was promised is kept for 50 ms more.
    assert rejected.reason == "rate"
    assert time.monotonic() - start >= 0.1
    assert limiter.snapshot()["search"].remaining == 0


@pytest.mark.parametrize("rate", [100])
def test_r16_it_does_so_too_where_a_token_comes_within_50_ms(clock: FakeClock, rate: float) -> None:
    limiter = drained(clock, rate=rate)

    async def main() -> Decision:
        return await asyncio.wait_for(limiter.acquire("search", max_wait=0.1), 1)

    assert asyncio.run(main()).reason == "rate"


def test_r16_a_thread_waits_though_pythons_clocks_are_frozen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limiter = Limiter({"search": ToolRateLimit(200, 1, max_wait=LONG)})
    assert limiter.try_acquire("search")
    for name in ("monotonic", "time", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: 1000.0)
    assert limiter.acquire_sync("search")


def test_r16_who_cannot_be_served_in_time_is_rejected_without_a_wait(
    wait: Waits, clock: FakeClock
) -> None:
    limiter = drained(clock, rate=1 / 60)
    # It would not end while the clock stands.
    assert wait(limiter, max_wait=5).retry_after == pytest.approx(60)


async def test_r16_of_200_calls_those_wait_who_can_be_served_in_3_s(clock: FakeClock) -> None:
    limiter = Limiter({"search": ToolRateLimit(5, 5, max_wait=3.1)}, clock=clock)
    tasks = await waiting(limiter, 200)
    decided = [task.result().admitted for task in tasks if task.done()]
    assert (decided.count(True), decided.count(False)) == (5, 180)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_a_call_may_wait_for_just_as_long_as_it_was_told() -> None:
    clock = FakeClock()
    limiter = drained(clock, rate=4)

    async def main() -> bool:
        told = limiter.try_acquire("search").retry_after
        tasks = await waiting(limiter, 1, max_wait=told)
        is_done = tasks[0].done()
        tasks[0].cancel()
        return not is_done

    assert asyncio.run(main())


async def test_r16_a_wait_is_for_what_is_missing(clock: FakeClock) -> None:
    limiter = Limiter({"search": ToolRateLimit(1, 3)}, clock=clock)
    assert limiter.try_acquire("search")
    # It lacks one token, not three.
    assert not limiter.try_acquire("search", cost=3)
    assert not (await waiting(limiter, 1, cost=3, max_wait=1.01))[0].done()
    assert (await waiting(limiter, 1, cost=3, max_wait=0.99))[0].done()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.sleep(0)


class Broken(Exception):
    """A clock's."""


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt, "text", math.nan], ids=str)
def test_a_clock_that_fails_while_a_call_waits_ends_that_and_nothing_else(error: Any) -> None:
    readings = 0
    fails_from: float = math.inf

    def clock() -> Any:
        nonlocal readings
        readings += 1
        if readings >= fails_from:
            if isinstance(error, type) and issubclass(error, BaseException):
                raise error
            return error
        return 1000.0 + ahead

    ahead = 0.0
    limiter = drained(clock, rate=50)
    expected = error if isinstance(error, type) else ConfigError
    # As it is asked, as it gets a place, and as its turn would come.
    for later in (1, 2, 3):
        fails_from = readings + later
        with pytest.raises(expected):
            limiter.acquire_sync("search", max_wait=LONG)
        fails_from = math.inf
        assert limiter.snapshot()["search"].remaining == 0
    if expected is not KeyboardInterrupt:

        async def main() -> None:
            nonlocal fails_from, ahead
            for later in (1, 2, 3):
                fails_from = readings + later
                with pytest.raises(expected):
                    await asyncio.wait_for(limiter.acquire("search", max_wait=LONG), LONG)
                fails_from = math.inf

        asyncio.run(main())
    ahead = 1.0
    # Nobody is left in the way.
    assert limiter.try_acquire("search")


async def test_a_clock_that_asks_the_limiter_as_a_call_waits() -> None:
    limiters: list[Limiter] = []
    now = [1000.0]

    def clock() -> float:
        if limiters and now[0] > 1000:
            limiter = limiters.pop()
            assert not limiter.try_acquire("search", cost=1)
            limiter.snapshot()
            limiters.append(limiter)
        return now[0]

    limiter = drained(clock, rate=100)
    tasks = await waiting(limiter, 2, max_wait=LONG)
    limiters.append(limiter)
    now[0] += 0.01
    assert await ends(tasks[0])
    limiters.clear()
    now[0] += 1
    assert await ends(tasks[1])


# --- reloads and pauses --------------------------------------------------------------------------


def in_order(tasks: list[Task[Decision]]) -> list[int]:
    """Notes who ends, as they do."""
    ended: list[int] = []

    def note(number: int, _task: object) -> None:
        ended.append(number)

    for number, task in enumerate(tasks):
        task.add_done_callback(partial(note, number))
    return ended


async def test_r49_a_reload_loses_none_of_20_who_wait_and_keeps_their_order() -> None:
    limiter = Limiter({"search": ToolRateLimit(1, 1, max_wait=LONG)})
    assert limiter.try_acquire("search")
    tasks = await waiting(limiter, 20)
    ended = in_order(tasks)
    for rate in (2, 1, 500):
        limiter.reload({"search": ToolRateLimit(rate, 1, max_wait=LONG)})
        await asyncio.sleep(0)
        assert not limiter.try_acquire("search")
    decisions = await asyncio.wait_for(asyncio.gather(*tasks), LONG)
    assert all(decisions)
    assert ended == list(range(20))


OTHER_LIMITS = {
    "fields": {"search": ToolRateLimit(500, 1, max_wait=LONG, per=["tenant"])},
    "name": {"other": ToolRateLimit(500, 1, max_wait=LONG, tools="s*")},
    "tools": {"other": ToolRateLimit(500, 1, max_wait=LONG, tools="nothing")},
}


@pytest.mark.parametrize("limits", OTHER_LIMITS.values(), ids=OTHER_LIMITS)
async def test_r49_so_does_one_to_another_name_or_other_fields(
    limits: dict[str, ToolRateLimit],
) -> None:
    limiter = Limiter({"search": ToolRateLimit(1, 1, max_wait=LONG)})
    assert limiter.try_acquire("search")
    tasks = await waiting(limiter, 5, tenant="acme")
    ended = in_order(tasks)
    limiter.reload(limits)
    assert all(await asyncio.wait_for(asyncio.gather(*tasks), LONG))
    assert ended == list(range(5))


async def test_r49_who_waited_through_a_change_of_fields_is_in_nobodys_way(
    clock: FakeClock,
) -> None:
    limiter = drained(clock, rate=100, max_wait=LONG)
    tasks = await waiting(limiter, 1, tenant="acme")
    limiter.reload({"search": ToolRateLimit(100, 1, max_wait=LONG, per=["tenant"])})
    await asyncio.sleep(0)
    clock.advance(0.01)
    assert await ends(tasks[0])
    clock.advance(0.01)
    assert limiter.try_acquire("search", tenant="acme")


async def test_r49_a_shorter_max_wait_holds_for_those_who_wait(clock: FakeClock) -> None:
    limiter = drained(clock, max_wait=DAY)
    tasks = await waiting(limiter, 20)
    given = await waiting(limiter, 1, max_wait=DAY)
    limiter.reload({"search": ToolRateLimit(1, 1, max_wait=5)})
    await asyncio.sleep(0.01)
    # Those who came first may be served in time; one who said another bound keeps that.
    assert [task.done() for task in tasks] == [False] * 5 + [True] * 15
    assert [task.result().reason for task in tasks[5:]] == ["rate"] * 15
    assert not given[0].done()
    limiter.reload({"search": ToolRateLimit(1, 1)})
    rejected = [await ends(task) for task in tasks[:5]]
    assert not any(rejected)
    clock.advance(1)
    limiter.reload({"search": ToolRateLimit(1000, 1)})
    assert await ends(given[0])


async def test_r49_a_higher_max_concurrent_lets_those_who_wait_go_at_once() -> None:
    def limits(most: int | None) -> dict[str, ToolRateLimit]:
        return {"search": ToolRateLimit(1e6, 1000, max_concurrent=most, max_wait=LONG)}

    limiter = Limiter(limits(1))
    with limiter.try_acquire("search"):
        tasks = await waiting(limiter, 5)
        ended = in_order(tasks)
        limiter.reload(limits(3))
        first = [await ends(task) for task in tasks[:2]]
        await asyncio.sleep(0.005)
        assert ended == [0, 1]
        limiter.reload(limits(1))
        for decision in first:
            with decision:
                pass
        await asyncio.sleep(0.005)
        assert ended == [0, 1]
    with await ends(tasks[2]):
        await asyncio.sleep(0.005)
        assert ended == [0, 1, 2]
        limiter.reload(limits(None))
        with await ends(tasks[3]), await ends(tasks[4]):
            assert ended == [0, 1, 2, 3, 4]


async def test_a_pause_rejects_at_once_who_cannot_be_served_in_time_any_more(
    clock: FakeClock,
) -> None:
    limiter = drained(clock, rate=1)
    short = await waiting(limiter, 3, max_wait=5)
    long = await waiting(limiter, 1, max_wait=DAY)
    limiter.pause("search", 600)
    rejected = [await ends(task) for task in short]
    assert [decision.reason for decision in rejected] == ["paused"] * 3
    assert all(decision.retry_after > 600 for decision in rejected if decision.retry_after)
    assert not long[0].done()
    clock.advance(601)
    # A reload has everybody ask again; the pause ended with an empty bucket, and a second ago.
    limiter.reload({"search": ToolRateLimit(1, 1)})
    assert await ends(long[0])
    assert not limiter.try_acquire("search")


def test_a_pause_ends_and_who_waited_through_it_is_served(wait: Waits) -> None:
    limiter = Limiter({"search": ToolRateLimit(1000, 1000, max_wait=LONG)})
    limiter.pause("search", 0.05)
    assert wait(limiter)


def test_a_snapshot_says_how_long_a_pause_goes_on(clock: FakeClock) -> None:
    limiter = Limiter({"search": ToolRateLimit(1, 1)}, default=ToolRateLimit(1, 1), clock=clock)
    limiter.pause("search", 600)
    limiter.pause("other", 60)
    limiter.pause("another", 1.5)

    def paused() -> dict[str, float | None]:
        return {name: snapshot.paused for name, snapshot in limiter.snapshot().items()}

    assert paused() == {"search": 600, "[default]": 60}
    clock.advance(60)
    assert paused() == {"search": 540, "[default]": None}
    limiter.reload({"search": ToolRateLimit(2, 1)})
    assert paused()["search"] == 540


async def test_in_a_dry_run_nobody_waits(clock: FakeClock) -> None:
    limiter = drained(clock, max_wait=LONG)
    tasks = await waiting(limiter, 3)
    limiter.reload({"search": ToolRateLimit(1, 1, max_wait=LONG)}, dry_run=True)
    for decision in [await ends(task) for task in tasks]:
        assert (decision.admitted, decision.reason) == (True, "rate")


def test_a_bound_where_nothing_waits_is_no_field() -> None:
    limiter = Limiter({"search": ToolRateLimit(1, 1)})
    with pytest.raises(ConfigError, match="max_wait is no field of a call"):
        limiter.try_acquire("search", max_wait=2)
    assert limiter.snapshot()["search"].remaining == 1
