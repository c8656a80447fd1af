"""`Limiter`: decisions, the injected clock, and looking without spending."""

# ruff: noqa: S301 - what is unpickled was pickled here.

from __future__ import annotations

import copy
import gc
import math
import pickle
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from callgate import ConfigError, Decision, Limiter, LimitSnapshot, ToolRateLimit
from callgate._callgate import Turn, decision_counts

from .clocks import FakeClock

RATES = {
    "3/s": Fraction(3),
    "7/s": Fraction(7),
    "0.1/s": Fraction(1, 10),
    "1/day": Fraction(1, 86_400),
    "700/min": Fraction(700, 60),
}
NO_MAPPING = "limits must be a mapping of names to ToolRateLimit, got"
NO_TEXT = "a limit's name must be a str: its tool's name, such as tool.name, got"
NO_NAME = (
    "name must be a tool's name or a pattern with * and ?, "
    "without spaces around it and without [, ], { or }, got"
)
STARTS = [0.0, 1000.3, 1.7e9 + 0.123, -5000.7]


def limiter_of(rate: str, burst: int, clock: Callable[[], float]) -> Limiter:
    """A limiter of one tool, `search`."""
    return Limiter({"search": ToolRateLimit.parse(rate, burst)}, clock=clock)


def remaining(limiter: Limiter) -> int | None:
    """The whole tokens in the bucket of `search`."""
    return limiter.snapshot()["search"].remaining


def wait_of(decision: Decision) -> float:
    """The seconds until a rejected call may be retried."""
    assert not decision.admitted
    assert decision.retry_after is not None
    assert decision.retry_after > 0
    return decision.retry_after


# --- decisions -----------------------------------------------------------------------------------


def test_a_burst_is_admitted_and_the_next_call_is_rejected(clock: FakeClock) -> None:
    limiter = limiter_of("2/s", 3, clock)
    admitted = [limiter.try_acquire("search") for _ in range(3)]
    assert [decision.remaining for decision in admitted] == [2, 1, 0]
    for decision in admitted:
        assert decision
        assert decision.admitted
        assert decision.tool == "search"
        assert (decision.limit, decision.reason, decision.retry_after) == (None, None, None)

    rejected = limiter.try_acquire("search")
    assert not rejected
    assert not rejected.admitted
    assert (rejected.tool, rejected.limit, rejected.reason) == ("search", "search", "rate")
    assert rejected.remaining == 0
    assert wait_of(rejected) == pytest.approx(0.5)


def test_a_rejection_changes_nothing(clock: FakeClock) -> None:
    limiter = limiter_of("1/s", 1, clock)
    assert limiter.try_acquire("search")
    for _ in range(1000):
        assert not limiter.try_acquire("search")
    clock.advance(1)
    assert limiter.try_acquire("search")


def test_tools_have_buckets_of_their_own(clock: FakeClock) -> None:
    limiter = Limiter({"a": ToolRateLimit(1, 1), "b": ToolRateLimit(1, 2)}, clock=clock)
    assert limiter.try_acquire("a")
    assert not limiter.try_acquire("a")
    assert [limiter.try_acquire("b").admitted for _ in range(3)] == [True, True, False]


def test_a_tool_without_a_limit_is_always_admitted(clock: FakeClock) -> None:
    limiter = limiter_of("1/s", 1, clock)
    for name in ("other", "", "Search", "search ", "sea", "s*", "search\0"):
        for cost in (1, 10**12):
            decision = limiter.try_acquire(name, cost=cost)
            assert decision
            assert decision.tool == name
            assert (decision.limit, decision.reason) == (None, None)
            assert (decision.remaining, decision.retry_after) == (None, None)
    assert remaining(limiter) == 1


def test_time_refills_the_bucket_up_to_its_burst_and_no_further(clock: FakeClock) -> None:
    limiter = limiter_of("2/s", 3, clock)
    for _ in range(3):
        assert limiter.try_acquire("search")
    for elapsed, tokens in [(0.25, 0), (0.25, 1), (0.5, 2), (0.5, 3), (1e6, 3)]:
        clock.advance(elapsed)
        assert remaining(limiter) == tokens
    assert [limiter.try_acquire("search").admitted for _ in range(4)] == [True, True, True, False]


def test_a_call_costs_what_it_says(clock: FakeClock) -> None:
    limiter = limiter_of("1/s", 5, clock)
    assert limiter.try_acquire("search", cost=3).remaining == 2
    rejected = limiter.try_acquire("search", cost=3)
    assert (rejected.reason, rejected.remaining) == ("rate", 2)
    assert wait_of(rejected) == pytest.approx(1)
    assert limiter.try_acquire("search", cost=2).remaining == 0


def test_r05_a_cost_above_the_burst_is_its_own_reason_and_spends_nothing(clock: FakeClock) -> None:
    limiter = limiter_of("100/min", 100, clock)
    for cost in (101, 200, 2**32, 2**64, 10**40):
        dear = limiter.try_acquire("search", cost=cost)
        assert not dear
        assert (dear.reason, dear.retry_after, dear.limit) == ("cost", None, "search")
        assert dear.remaining == 100
    assert limiter.try_acquire("search", cost=100)
    assert remaining(limiter) == 0


def test_r01_a_rate_near_zero_admits_its_burst_and_then_waits_a_year(clock: FakeClock) -> None:
    limiter = limiter_of("0.0028/day", 1, clock)
    assert limiter.try_acquire("search")
    for _ in range(1000):
        assert wait_of(limiter.try_acquire("search")) > 350 * 86_400
    clock.advance(3600)
    assert wait_of(limiter.try_acquire("search")) > 350 * 86_400


def test_the_largest_burst_and_rate_hold(clock: FakeClock) -> None:
    limiter = Limiter({"search": ToolRateLimit(1e9, 2**32 - 1)}, clock=clock)
    assert limiter.try_acquire("search", cost=2**32 - 1)
    assert not limiter.try_acquire("search")
    clock.advance(1)
    assert remaining(limiter) == 10**9


def test_any_mapping_will_do_and_is_read_once(clock: FakeClock) -> None:
    limit = ToolRateLimit(1, 1)
    given_limits: dict[str, ToolRateLimit] = {"a": limit}
    mappings: list[Mapping[str, ToolRateLimit]] = [
        given_limits,
        OrderedDict(given_limits),
        MappingProxyType(given_limits),
    ]
    limiters = [Limiter(mapping, clock=clock) for mapping in mappings]
    given_limits["b"] = limit
    for limiter in limiters:
        assert list(limiter.snapshot()) == ["a"]
    assert Limiter({}).try_acquire("a").limit is None


def test_many_tools_are_told_apart(clock: FakeClock) -> None:
    names = [f"tool_{number}" for number in range(500)]
    limits = {name: ToolRateLimit(1, index + 1) for index, name in enumerate(names)}
    limiter = Limiter(limits, clock=clock)
    for index, name in enumerate(names):
        assert limiter.try_acquire(name).remaining == index
    assert [snapshot.remaining for snapshot in limiter.snapshot().values()] == list(range(500))


def test_names_beyond_ascii_are_names(clock: FakeClock) -> None:
    limiter = Limiter({"käufe": ToolRateLimit(1, 1), "検索": ToolRateLimit(1, 1)}, clock=clock)
    assert limiter.try_acquire("käufe")
    assert limiter.try_acquire("käufe").limit == "käufe"
    assert limiter.try_acquire("検索")


def test_a_decision_can_be_read_pickled_and_copied_but_not_made_or_changed() -> None:
    limiter = Limiter({"a": ToolRateLimit(3, 2)}, clock=FakeClock())
    decisions = [limiter.try_acquire("a", cost=cost) for cost in (2, 1, 3)]
    decisions.append(limiter.try_acquire("b"))
    fields = [
        "admitted=True, tool='a', limit=None, reason=None, remaining=0, retry_after=None",
        "admitted=False, tool='a', limit='a', reason='rate', remaining=0, retry_after=0.333333334",
        "admitted=False, tool='a', limit='a', reason='cost', remaining=0, retry_after=None",
        "admitted=True, tool='b', limit=None, reason=None, remaining=None, retry_after=None",
    ]
    assert [repr(decision) for decision in decisions] == [f"Decision({text})" for text in fields]
    for decision in decisions:
        for same in (
            pickle.loads(pickle.dumps(decision)),
            copy.copy(decision),
            copy.deepcopy(decision),
        ):
            assert repr(same) == repr(decision)
            assert bool(same) == bool(decision)
        for name in ("admitted", "retry_after", "other"):
            with pytest.raises(AttributeError):
                setattr(decision, name, 1)
    make: Any = Decision
    with pytest.raises(TypeError):
        make()


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cost",
    [
        *(-1, -0.0, 0, 0.0, 1e-9, 1.0, math.nan, math.inf, -math.inf, -(10**40)),
        *(True, False, None, "1", b"1", [1], Decimal(1)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("tool", ["search", "unlimited"])
def test_r04_a_bad_cost_is_refused_before_anything_changes(
    tool: str, cost: Any, clock: FakeClock
) -> None:
    limiter = limiter_of("1/s", 3, clock)
    assert limiter.try_acquire("search")
    with pytest.raises(ConfigError) as refused:
        limiter.try_acquire(tool, cost=cost)
    assert str(refused.value) == (
        f"tool '{tool}': cost must be a whole number of at least 1, got {cost!r}"
    )
    assert remaining(limiter) == 2


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (None, f"{NO_MAPPING} None"),
        (2, f"{NO_MAPPING} 2"),
        *(
            (
                path,
                (
                    "limits must be a mapping of names to ToolRateLimit (Limiter.from_file reads a file), "
                    f"got {path!r}"
                ),
            )
            for path in ("limits.toml", Path("limits.toml"))
        ),
        (
            [("search", ToolRateLimit(1, 1))],
            f"{NO_MAPPING} [('search', ToolRateLimit(requests_per_second=1, burst=1))]",
        ),
        ({"search": 2}, "limit 'search' must be a ToolRateLimit, got 2"),
        ({"search": None}, "limit 'search' must be a ToolRateLimit, got None"),
        ({"search": True}, "limit 'search' must be a ToolRateLimit, got True"),
        ({"search": "2/s"}, "limit 'search' must be a ToolRateLimit, got '2/s'"),
        (
            {"search": {"requests_per_second": 2, "burst": 2}},
            "limit 'search' must be a ToolRateLimit, got {'requests_per_second': 2, 'burst': 2}",
        ),
        ({1: ToolRateLimit(1, 1)}, f"{NO_TEXT} 1"),
        ({None: ToolRateLimit(1, 1)}, f"{NO_TEXT} None"),
        ({b"a": ToolRateLimit(1, 1)}, f"{NO_TEXT} b'a'"),
        ({"\ud800": ToolRateLimit(1, 1)}, "a limit's name must be valid Unicode, got '\\ud800'"),
        *(
            (
                {name: ToolRateLimit(1, 1)},
                f"{NO_NAME} '{name}'",
            )
            for name in ("", " ", "search ", " search", "[ab]", "crm_[ab]", "{a,b}", "[default]")
        ),
    ],
    ids=ascii,
)
def test_bad_limits_are_refused_when_they_are_given(limits: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Limiter(limits)
    assert str(refused.value) == message


def admit(limiter: Limiter, tool: Any, **fields: Any) -> Decision | None:
    """Asks as front ends do."""
    begun = limiter._admit(tool, None, lambda _context, _names: fields)
    assert not isinstance(begun, Turn)
    return begun


def test_a_name_that_is_no_unicode_is_matched_by_its_replacement_text(clock: FakeClock) -> None:
    limits = {"search": ToolRateLimit(1, 1), "crm_?": ToolRateLimit(1, 1)}
    limiter = Limiter(limits, clock=clock)
    assert [limiter.try_acquire("search\ud800").remaining for _ in range(3)] == [None] * 3
    assert remaining(limiter) == 1
    # Never into no limit where a pattern is meant for whatever it is.
    limiter = Limiter({"crm_*": ToolRateLimit(1, 1)}, default=ToolRateLimit(1, 1), clock=clock)
    for name, limit in [("crm_\ud800", "crm_*"), ("\udfff", "[default]")]:
        assert limiter.try_acquire(name)
        refused = limiter.try_acquire(name)
        assert (refused.tool, refused.limit) == (name, limit)
        assert admit(limiter, name) is not None


@pytest.mark.parametrize("tool", [None, 2, b"search", ["search"]], ids=repr)
def test_a_tool_that_is_no_name_is_refused(tool: Any, clock: FakeClock) -> None:
    limiter = limiter_of("1/s", 1, clock)
    for ask in (limiter.try_acquire, partial(admit, limiter)):
        with pytest.raises(ConfigError) as refused:
            ask(tool)
        assert (
            str(refused.value)
            == f"tool must be a tool's name (a str, such as its .name), got {tool!r}"
        )


@pytest.mark.parametrize(
    ("arguments", "named", "word"),
    [
        ((), {}, "tool"),
        (("search", 2), {}, "positional"),
        ((), {"cost": 2}, "tool"),
    ],
    ids=str,
)
def test_a_missing_or_positional_argument_of_a_call_is_a_type_error_that_names_it(
    arguments: tuple[Any, ...], named: dict[str, Any], word: str, clock: FakeClock
) -> None:
    limiter = limiter_of("1/s", 1, clock)
    ask: Any = limiter.try_acquire
    with pytest.raises(TypeError, match=word):
        ask(*arguments, **named)
    assert remaining(limiter) == 1


@pytest.mark.parametrize(
    "reading", [math.nan, math.inf, -math.inf, 1e30, None, "1", [1.0]], ids=repr
)
def test_a_clock_must_return_a_finite_float(reading: Any, clock: FakeClock) -> None:
    message = f"clock must return seconds as a finite float, got {reading!r}"
    with pytest.raises(ConfigError) as refused:
        limiter_of("1/s", 1, lambda: reading)
    assert str(refused.value) == message

    limiter = limiter_of("1/s", 1, clock)
    before, clock.now = clock.now, reading
    for look in (lambda: limiter.try_acquire("search"), limiter.snapshot):
        with pytest.raises(ConfigError) as refused:
            look()
        assert str(refused.value) == message
    clock.now = before
    assert limiter.try_acquire("search")


@pytest.mark.parametrize("clock", [5, 0.0, "now", True], ids=repr)
def test_a_clock_must_be_callable(clock: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        limiter_of("1/s", 1, clock)
    assert str(refused.value) == (
        f"clock must be a callable that returns seconds as a float, got {clock!r}"
    )


def test_what_the_clock_raises_comes_out_and_nothing_is_spent(clock: FakeClock) -> None:
    broken = False

    def read() -> float:
        if broken:
            raise OSError("no time")
        return clock()

    limiter = limiter_of("1/s", 1, read)
    broken = True
    with pytest.raises(OSError, match="no time"):
        limiter.try_acquire("search")
    assert limiter.try_acquire("unlimited")  # reads no clock
    assert repr(limiter).startswith("Limiter(")
    broken = False
    assert limiter.try_acquire("search")


# --- looking -------------------------------------------------------------------------------------


def test_looking_spends_nothing(clock: FakeClock) -> None:
    limits = {"b": ToolRateLimit(1, 3), "a": ToolRateLimit.per_minute(30, 5)}
    limiter = Limiter(limits, clock=clock)
    limiter.try_acquire("b")
    for _ in range(100):
        looked = limiter.snapshot()
        assert list(looked) == ["b", "a"]
        assert {name: snapshot.limit for name, snapshot in looked.items()} == limits
        assert [snapshot.remaining for snapshot in looked.values()] == [2, 5]
        assert all(isinstance(snapshot, LimitSnapshot) for snapshot in looked.values())
        assert repr(limiter) == f"Limiter({limits!r})"


def test_a_snapshot_is_of_its_moment(clock: FakeClock) -> None:
    limiter = limiter_of("1/s", 3, clock)
    before = limiter.snapshot()
    limiter.try_acquire("search", cost=3)
    assert before["search"].remaining == 3
    with pytest.raises(AttributeError):
        before["search"].remaining = 4  # type: ignore[misc]


def counts_of(tool: str) -> dict[tuple[str | None, str], int]:
    """How the process's counts stand for a tool, by limit and outcome."""
    return {
        (limit, outcome): count for name, limit, outcome, count in decision_counts() if name == tool
    }


def test_decisions_are_counted_by_tool_and_outcome_over_all_limiters(clock: FakeClock) -> None:
    name = "counted by one test alone"
    limits = {name: ToolRateLimit(1, 2), "unused": ToolRateLimit(1, 1)}
    bad: Any = 0
    for _ in range(2):
        limiter = Limiter(limits, clock=clock)
        for _ in range(5):
            limiter.try_acquire(name)
        admit(limiter, name)
        limiter.try_acquire(name, cost=3)
        limiter.snapshot()
        with pytest.raises(ConfigError):
            limiter.try_acquire(name, cost=bad)
        del limiter
        gc.collect()
    assert counts_of(name) == {
        (None, "admitted"): 4,
        (name, "rejected_rate"): 8,
        (name, "rejected_cost"): 2,
    }
    assert counts_of("unused") == {}
    Limiter({}).try_acquire(f"{name}, without a limit")
    assert counts_of(f"{name}, without a limit") == {}


def test_an_injected_clock_that_holds_its_limiter_is_collected() -> None:
    clock = FakeClock()
    clock.limiter = limiter_of("1/s", 1, clock)  # type: ignore[attr-defined]
    gone = weakref.ref(clock)
    del clock
    gc.collect()
    assert gone() is None


def test_a_limiter_is_neither_pickled_nor_copied_by_mistake(clock: FakeClock) -> None:
    limiter = limiter_of("1/s", 1, clock)
    for take in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="Limiter"):
            take(limiter)


# --- time ----------------------------------------------------------------------------------------


def test_the_default_clock_is_real_and_monotonic() -> None:
    limiter = Limiter({"search": ToolRateLimit(50, 1)})
    assert limiter.try_acquire("search")
    wait = limiter.try_acquire("search").retry_after
    assert wait is not None
    assert 0 < wait <= 0.02
    time.sleep(wait)  # The real timer is what is tested.
    assert limiter.try_acquire("search")


def test_a_clock_stepping_back_mints_nothing_and_blocks_nobody_for_the_step() -> None:
    clock = FakeClock(1e6)
    limiter = limiter_of("1/s", 2, clock)
    assert limiter.try_acquire("search", cost=2)
    for _ in range(3):
        clock.now -= 1e5
        rejected = limiter.try_acquire("search")
        assert wait_of(rejected) == pytest.approx(1)
        clock.advance(0.5)
        assert wait_of(limiter.try_acquire("search")) == pytest.approx(0.5)
        clock.advance(0.5)
        assert limiter.try_acquire("search")
        assert not limiter.try_acquire("search")


def test_a_clock_that_stands_mints_nothing(clock: FakeClock) -> None:
    limiter = limiter_of("1000000000/s", 5, clock)
    assert [limiter.try_acquire("search").admitted for _ in range(7)] == [True] * 5 + [False] * 2


@pytest.mark.parametrize("leap", [1e5, 1e9, 4.6e9], ids=str)
def test_a_leap_forward_fills_the_bucket_once(leap: float) -> None:
    clock = FakeClock()
    limiter = limiter_of("1/s", 3, clock)
    assert limiter.try_acquire("search", cost=3)
    clock.advance(leap)
    assert [limiter.try_acquire("search").admitted for _ in range(4)] == [True] * 3 + [False]
    clock.advance(leap)
    assert sum(limiter.try_acquire("search").admitted for _ in range(9)) == 3


@pytest.mark.parametrize("leap", [9.3e9, -9.3e9, 1e18, -1e18], ids=str)
def test_a_reading_beyond_a_limiters_time_is_refused_and_leaves_it_as_it_was(leap: float) -> None:
    clock = FakeClock(1000.0)
    limiter = limiter_of("1/s", 2, clock)
    assert limiter.try_acquire("search")
    clock.advance(leap)
    for ask in (lambda: limiter.try_acquire("search"), limiter.snapshot):
        with pytest.raises(ConfigError) as refused:
            ask()
        assert str(refused.value) == (
            "clock must return seconds, within 2^63 ns (292 years) of its first reading, "
            f"got {clock.now!r}"
        )
    clock.now = 1000.0
    assert [limiter.try_acquire("search").admitted for _ in range(2)] == [True, False]


def test_a_clock_in_nanoseconds_is_found_out() -> None:
    clock = FakeClock()
    limiter = Limiter({"search": ToolRateLimit(1, 1)}, clock=clock)
    clock.now = 10e9
    with pytest.raises(ConfigError, match="clock must return seconds"):
        limiter.try_acquire("search")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, RecursionError])
def test_what_is_no_fault_of_a_value_is_passed_on(error: type[BaseException]) -> None:
    class Hostile:
        def __index__(self) -> int:
            raise error

        def __float__(self) -> float:
            raise error

    hostile: Any = Hostile()
    limiter = Limiter({"search": ToolRateLimit(1, 1)})
    for give in (
        lambda: ToolRateLimit(hostile, 1),
        lambda: ToolRateLimit(1, hostile),
        lambda: ToolRateLimit.per_minute(hostile, 1),
        lambda: limiter.try_acquire("search", cost=hostile),
        lambda: Limiter({}, clock=lambda: hostile),
    ):
        with pytest.raises(error):
            give()
    assert limiter.snapshot()["search"].remaining == 1


def test_an_interrupt_while_a_value_is_shown_is_passed_on() -> None:
    class Hostile:
        def __repr__(self) -> str:
            raise KeyboardInterrupt

    hostile: Any = Hostile()
    with pytest.raises(KeyboardInterrupt):
        ToolRateLimit(1, hostile)


def test_a_reading_up_to_two_seconds_low_counts_as_the_highest() -> None:
    clock = FakeClock(1000.0)
    limiter = limiter_of("1/s", 1, clock)
    assert limiter.try_acquire("search")
    clock.now = 998.5
    # At 1001 by a clock that now says 998.5.
    assert wait_of(limiter.try_acquire("search")) == pytest.approx(2.5)
    clock.now = 1000.5
    assert wait_of(limiter.try_acquire("search")) == pytest.approx(0.5)
    clock.now = 1001.0
    assert limiter.try_acquire("search")


def test_r09_a_clock_that_is_1_6_s_low_on_every_second_call() -> None:
    time_now = 1000.0
    low = True

    def clock() -> float:
        nonlocal low
        low = not low
        return time_now - 1.6 if low else time_now

    limiter = limiter_of("1/s", 5, clock)
    assert all(limiter.try_acquire("search") for _ in range(5))
    assert not limiter.try_acquire("search")
    admitted = 5
    for _ in range(1000):
        time_now += 0.1
        admitted += limiter.try_acquire("search").admitted
    assert 5 + 0.95 * 100 <= admitted <= 5 + 100


def test_r09_a_clock_that_is_1_6_s_low_on_one_of_two_threads() -> None:
    time_now = 1000.0
    low = False

    def clock() -> float:
        return time_now - 1.6 if low else time_now

    limiter = limiter_of("1/s", 5, clock)

    def ask(*, on_low_core: bool) -> bool:
        nonlocal low
        low = on_low_core
        return limiter.try_acquire("search").admitted

    with ThreadPoolExecutor(1) as low_core:
        admitted = 0
        for call in range(5):
            there = call % 2 == 0
            admitted += (
                low_core.submit(ask, on_low_core=True).result() if there else ask(on_low_core=False)
            )
        assert admitted == 5
        for call in range(1000):
            time_now += 0.1
            there = call % 2 == 0
            admitted += (
                low_core.submit(ask, on_low_core=True).result() if there else ask(on_low_core=False)
            )
    assert 5 + 0.95 * 100 <= admitted <= 5 + 100


def test_a_clock_may_ask_the_limiter_itself() -> None:
    nested: list[bool] = []
    depth = 0

    def clock() -> float:
        nonlocal depth
        if depth == 1:
            depth = 2
            nested.append(limiter.try_acquire("search").admitted)
            assert limiter.snapshot()["search"].remaining == 1
        return 1000.0

    limiter = limiter_of("1/s", 2, clock)
    depth = 1
    assert limiter.try_acquire("search").remaining == 0
    assert nested == [True]


# --- retry_after ---------------------------------------------------------------------------------


def test_r06_one_in_two_seconds_is_admitted_at_two_and_not_before() -> None:
    clock = FakeClock()
    limiter = limiter_of("0.5/s", 1, clock)
    assert limiter.try_acquire("search")
    clock.now = 1.9995
    assert limiter.try_acquire("search").retry_after == pytest.approx(0.0005)
    clock.now = 2.0
    assert limiter.try_acquire("search")


def retries(rate: str, start: float, cycles: int) -> None:
    """Retries exactly when told: each retry is admitted, and none would be any earlier."""
    clock = FakeClock(start)
    limiter = limiter_of(rate, 1, clock)
    assert limiter.try_acquire("search")
    for _ in range(cycles):
        told = clock.now + wait_of(limiter.try_acquire("search"))
        # As much earlier as a float tells apart there, and at least 2 ns.
        clock.now = told - max(2e-9, math.ulp(told))
        wait_of(limiter.try_acquire("search"))
        clock.now = told
        assert limiter.try_acquire("search")


@pytest.mark.parametrize("rate", RATES)
def test_r06_a_hundred_thousand_retries_at_the_told_time_are_all_admitted(rate: str) -> None:
    clock = FakeClock()
    limiter = limiter_of(rate, 1, clock)
    assert limiter.try_acquire("search")
    for _ in range(100_000):
        clock.now += wait_of(limiter.try_acquire("search"))
        assert limiter.try_acquire("search")
    # Told times do not drift: each is at most a nanosecond, or what a float cannot tell, late.
    ideal = 100_000 / RATES[rate]
    assert ideal <= clock.now <= ideal + 100_000 * (1e-9 + math.ulp(clock.now))


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("rate", RATES)
def test_r06_a_retry_at_the_told_float_is_admitted_and_none_earlier(
    rate: str, start: float
) -> None:
    retries(rate, start, 2000)


@given(
    st.sampled_from(["s", "min", "h", "day"]),
    st.integers(1, 10**6),
    st.floats(-1e12, 1e12),
    st.integers(1, 5),
)
@example("s", 3, 1.7e9, 1)
@example("s", 7, -0.1, 1)
@example("day", 1, 1e12, 5)
def test_r06_a_retry_at_the_told_float_is_admitted_at_any_rate_from_any_reading(
    unit: str, count: int, start: float, burst: int
) -> None:
    clock = FakeClock(start)
    limiter = limiter_of(f"{count}/{unit}", burst, clock)
    for cost in (burst, 1, burst, burst):
        decision = limiter.try_acquire("search", cost=cost)
        if not decision:
            clock.now += wait_of(decision)
            assert limiter.try_acquire("search", cost=cost)


@pytest.mark.parametrize(
    ("rate", "due"),
    [
        ("700/min", 701),
        ("59999/min", 60_000),
        ("60001/min", 60_002),
        ("120000/min", 120_001),
        ("1500/s", 90_001),
        ("8000/s", 480_001),
    ],
)
def test_r02_a_greedy_caller_gets_the_rate_and_no_more(rate: str, due: int) -> None:
    clock = FakeClock()
    limiter = limiter_of(rate, 1, clock)
    admitted = 0
    while clock.now <= 60:
        decision = limiter.try_acquire("search")
        if decision:
            admitted += 1
        else:
            clock.now += wait_of(decision)
    assert abs(admitted - due) <= 1


def test_r02_a_rate_above_the_highest_is_refused_with_the_range() -> None:
    with pytest.raises(ConfigError, match=r"1,000,000,000 per second, got 2000000000\.0"):
        ToolRateLimit(2e9, 2_000_000_000)


# --- against exact fractions ---------------------------------------------------------------------


class ExactBucket:
    """A token bucket in rational numbers."""

    def __init__(self, rate: Fraction, burst: int) -> None:
        self.rate = rate
        self.burst = burst
        self.level = Fraction(burst)
        self.since = Fraction(0)

    def level_at(self, now: Fraction) -> Fraction:
        return min(Fraction(self.burst), self.level + self.rate * (now - self.since))

    def spend(self, now: Fraction, cost: int) -> None:
        self.level = self.level_at(now) - cost
        self.since = now


@settings(max_examples=300)
@given(
    st.sampled_from(["s", "min", "h", "day"]),
    st.integers(1, 10**5),
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 10**4), st.integers(0, 12), st.integers(1, 6)), max_size=60),
)
def test_decisions_are_those_of_an_exact_bucket_within_two_nanoseconds(
    unit: str, count: int, burst: int, calls: list[tuple[int, int, int]]
) -> None:
    seconds = {"s": 1, "min": 60, "h": 3600, "day": 86_400}[unit]
    exact = ExactBucket(Fraction(count, seconds), burst)
    late = max(Fraction(2, 10**9), Fraction(1, 10**9) / exact.rate)
    clock = FakeClock()
    limiter = limiter_of(f"{count}/{unit}", burst, clock)
    nanos = 0
    for thousandths, power, cost in calls:
        # Up to ten tokens' time later, and as little as nothing.
        nanos += int(Fraction(thousandths, 1000 * 4**power) / exact.rate * 10**9)
        clock.now = nanos / 1e9
        now = Fraction(math.floor(Fraction(clock.now) * 10**9 + Fraction(1, 2)), 10**9)
        decision = limiter.try_acquire("search", cost=cost)
        if decision:
            assert exact.level_at(now) >= cost
            exact.spend(now, cost)
        elif cost > burst:
            assert decision.reason == "cost"
        else:
            assert decision.reason == "rate"
            assert now - late < exact.since or exact.level_at(now - late) < cost
