"""Which limits hold for a call, from which bucket it draws, and what several limits do together."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Callable
from enum import Enum, IntEnum
from itertools import permutations
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from callgate import ConfigError, Limiter, ToolRateLimit
from callgate._callgate import decision_counts

from .clocks import FakeClock
from .running import hammer, run_program

PROGRAMS = Path(__file__).parent / "programs"

HOUR = 3600.0


def hourly(burst: int, **options: Any) -> ToolRateLimit:
    """A limit that refills too slowly to matter."""
    return ToolRateLimit.parse("1/h", burst, **options)


def admitted(limiter: Limiter, tool: str, times: int, **fields: Any) -> int:
    """How many of so many calls are admitted."""
    return sum(limiter.try_acquire(tool, **fields).admitted for _ in range(times))


def left(limiter: Limiter) -> dict[str, int | None]:
    """What the buckets hold, by the limit's name."""
    return {name: snapshot.remaining for name, snapshot in limiter.snapshot().items()}


def refused_by(limiter: Limiter, tool: str, **fields: Any) -> tuple[str | None, float | None]:
    """The limit that refuses a call, and for how long."""
    decision = limiter.try_acquire(tool, **fields)
    assert not decision
    return decision.limit, decision.retry_after


# --- which limits --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "meant", "others"),
    [
        ("crm_*", ["crm_", "crm_a", "crm_a/b.c:d", "crm_\n"], ["crm", "CRM_a", "a_crm_", ""]),
        ("*", ["a", "", "käufe", "*", "a b"], []),
        ("crm_?", ["crm_a", "crm_ä", "crm_検"], ["crm_", "crm_ab"]),
        ("*_read", ["_read", "a_b_read"], ["read", "a_read_"]),
        ("a*b*c", ["abc", "aXbYc", "abcbc"], ["ab", "acb", "abcd"]),
        ("a.b", ["a.b"], ["aXb", "ab"]),
    ],
)
def test_a_limits_name_may_be_a_pattern_of_tools(
    pattern: str, meant: list[str], others: list[str], clock: FakeClock
) -> None:
    for limits in ({pattern: hourly(1)}, {"shared": hourly(1, tools=[pattern])}):
        [name] = limits
        for tool in meant:
            limiter = Limiter(limits, clock=clock)
            assert limiter.try_acquire(tool)
            assert refused_by(limiter, tool)[0] == name
        limiter = Limiter(limits, clock=clock)
        for tool in others:
            assert limiter.try_acquire(tool).remaining is None


def test_all_tools_of_a_limit_share_its_bucket(clock: FakeClock) -> None:
    limiter = Limiter({"crm": hourly(3, tools=["crm_*", "lookup"])}, clock=clock)
    assert [limiter.try_acquire(tool).remaining for tool in ("crm_a", "lookup", "crm_b")] == [
        *(2, 1, 0),
    ]
    for tool in ("crm_a", "crm_new", "lookup"):
        assert refused_by(limiter, tool)[0] == "crm"
    # With tools given, its name is only a name.
    assert limiter.try_acquire("crm").remaining is None


def test_a_limit_per_tool_has_a_bucket_for_each(clock: FakeClock) -> None:
    limiter = Limiter({"crm_*": hourly(2, per=["tool"])}, clock=clock)
    for tool in ("crm_a", "crm_b"):
        assert admitted(limiter, tool, 5) == 2
    assert limiter.snapshot()["crm_*"].buckets == 2
    # The field is the tool's name, and nothing that a caller says.
    with pytest.raises(TypeError):
        limiter.try_acquire("crm_a", tool="crm_c")  # type: ignore[misc]


def test_the_default_holds_for_each_tool_that_no_other_limit_holds_for(clock: FakeClock) -> None:
    limits = {"search": hourly(1), "crm_*": hourly(1)}
    limiter = Limiter(limits, default=hourly(2), clock=clock)
    for tool in ("other", "another", "", "[default]"):
        assert admitted(limiter, tool, 5) == 2
        assert refused_by(limiter, tool)[0] == "[default]"
    for tool, limit in (("search", "search"), ("crm_a", "crm_*")):
        assert admitted(limiter, tool, 5) == 1
        assert refused_by(limiter, tool)[0] == limit
    assert list(limiter.snapshot()) == ["search", "crm_*", "[default]"]


def test_the_default_may_be_split_by_fields_too(clock: FakeClock) -> None:
    limiter = Limiter({}, default=hourly(1, per=["tenant", "tool"]), clock=clock)
    for tool in ("a", "b"):
        for tenant in ("x", "y", None):
            assert admitted(limiter, tool, 3, tenant=tenant) == 1


def test_the_default_names_no_tools_and_must_be_a_limit() -> None:
    for default, message in [
        (
            hourly(1, tools=["a"]),
            "limit '[default]': tools must be left out: it holds for all other tools",
        ),
        (5, "default must be a ToolRateLimit, got 5"),
        ({}, "default must be a ToolRateLimit, got {}"),
    ]:
        given_default: Any = default
        with pytest.raises(ConfigError) as refused:
            Limiter({}, default=given_default)
        assert str(refused.value).startswith(message)


def test_a_limiter_reads_as_it_was_made() -> None:
    limits = {"a": ToolRateLimit(1, 2), "b*": ToolRateLimit(1, 2, per="tenant")}
    for made, shown in [
        (Limiter(limits), f"Limiter({limits!r})"),
        (
            Limiter(limits, default=hourly(2), dry_run=True),
            f"Limiter({limits!r}, default={hourly(2)!r}, dry_run=True)",
        ),
    ]:
        assert repr(made) == shown
        assert repr(eval(shown)) == shown  # noqa: S307 - written here


def test_hundreds_of_patterns_and_names_are_told_apart(clock: FakeClock) -> None:
    limits = {f"t{number}_*": hourly(number + 1) for number in range(300)}
    limiter = Limiter({**limits, **{f"t{n}_exact": hourly(1) for n in range(300)}}, clock=clock)
    for number in range(300):
        # More names than are remembered, each twice.
        for tool in (f"t{number}_a", f"t{number}_b"):
            assert limiter.try_acquire(tool, cost=number + 2).limit == f"t{number}_*"
        exact = limiter.try_acquire(f"t{number}_exact")
        assert exact.remaining == 0
        assert left(limiter)[f"t{number}_*"] == number


# --- several limits ------------------------------------------------------------------------------

THREE = {
    "narrow": ToolRateLimit(1, 1, tools=["crm_*"]),
    "crm_a": ToolRateLimit(1, 3),
    "wide": ToolRateLimit.parse("1/min", 5, tools="*"),
}


@pytest.mark.parametrize("order", list(permutations(THREE)), ids="-".join)
def test_r32_a_call_is_charged_to_all_of_its_limits_or_to_none(
    order: tuple[str, ...], clock: FakeClock
) -> None:
    limiter = Limiter({name: THREE[name] for name in order}, clock=clock)
    decision = limiter.try_acquire("crm_a")
    assert (decision.admitted, decision.remaining) == (True, 0)
    assert left(limiter) == {"narrow": 0, "crm_a": 2, "wide": 4}
    for _ in range(10):
        assert refused_by(limiter, "crm_a") == ("narrow", 1.0)
    assert left(limiter) == {"narrow": 0, "crm_a": 2, "wide": 4}
    # The largest wait is told, and by whom.
    assert admitted(limiter, "other", 9) == 4
    assert refused_by(limiter, "crm_a") == ("wide", 60.0)
    assert refused_by(limiter, "crm_a", cost=2) == ("narrow", None)
    assert left(limiter) == {"narrow": 0, "crm_a": 2, "wide": 0}


@pytest.mark.parametrize("order", [1, -1])
def test_r32_a_user_who_is_blocked_does_not_drain_what_all_share(
    order: int, clock: FakeClock
) -> None:
    limits = [("shared", hourly(100, tools="lookup")), ("lookup", hourly(1, per=["user"]))]
    limiter = Limiter(dict(limits[::order]), clock=clock)
    assert admitted(limiter, "lookup", 20, user="first") == 1
    assert left(limiter) == {"shared": 99, "lookup": None}
    assert sum(admitted(limiter, "lookup", 2, user=f"user {n}") for n in range(99)) == 99
    limit, wait = refused_by(limiter, "lookup", user="one more")
    assert (limit, wait) == ("shared", HOUR)


def test_r32_threads_are_charged_to_all_of_their_limits_or_to_none(clock: FakeClock) -> None:
    limits = {
        "total": hourly(1000, tools="*"),
        "crm": hourly(400, tools="crm_*"),
        "users": hourly(30, per=["user"], tools="crm_*"),
    }
    limiter = Limiter(limits, clock=clock)

    def ask(number: int) -> int:
        mine = admitted(limiter, f"crm_{number}", 500, user=number)
        return mine + sum(
            limiter.try_acquire("crm_x", user=user % 60).admitted for user in range(2000)
        )

    assert hammer(ask) == 400
    assert left(limiter) == {"total": 600, "crm": 0, "users": None}


# --- cost ----------------------------------------------------------------------------------------


def test_a_call_costs_what_its_limits_say_unless_it_says_it(clock: FakeClock) -> None:
    limits = {
        "search": ToolRateLimit(1, 10, cost=4),
        "all": ToolRateLimit(1, 20, tools=["*"]),
    }
    limiter = Limiter(limits, clock=clock)
    assert limiter.try_acquire("search").remaining == 6
    assert left(limiter) == {"search": 6, "all": 19}
    assert limiter.try_acquire("search", cost=1)
    assert left(limiter) == {"search": 5, "all": 18}
    assert limiter.try_acquire("search")
    assert refused_by(limiter, "search") == ("search", 3.0)
    assert limiter.try_acquire("search", cost=1)
    assert refused_by(limiter, "search", cost=11) == ("search", None)
    assert left(limiter) == {"search": 0, "all": 16}


# --- quotas --------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(
    st.integers(2, 30),
    st.data(),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 3)), min_size=1, max_size=150),
)
def test_a_quota_is_never_exceeded_in_any_window(
    count: int, data: st.DataObject, calls: list[tuple[int, int]]
) -> None:
    burst = data.draw(st.none() | st.integers(1, count - 1))
    clock = FakeClock()
    limiter = Limiter({"search": ToolRateLimit.quota(count, "s", burst)}, clock=clock)
    spent: list[tuple[int, int]] = []
    now = 0
    for pause, cost in calls:
        now += pause * 100_000  # Up to 0.3 s, in nanoseconds.
        clock.now = now / 1e9
        if limiter.try_acquire("search", cost=cost):
            spent.append((now, cost))
    for start, _ in spent:
        window = sum(cost for time, cost in spent if start <= time <= start + 10**9)
        assert window <= count


@pytest.mark.parametrize(
    ("count", "per", "burst", "seconds"),
    [(100, "min", None, 60), (100, "min", 99, 60), (2, "h", 1, 3600), (5000, "day", 20, 86_400)],
)
def test_a_caller_who_always_comes_back_gets_the_quota_and_no_more(
    count: int, per: Any, burst: int | None, seconds: int
) -> None:
    clock = FakeClock()
    limiter = Limiter({"search": ToolRateLimit.quota(count, per, burst)}, clock=clock)
    times: list[float] = []
    while clock.now < 3 * seconds:
        decision = limiter.try_acquire("search")
        if decision:
            times.append(clock.now)
        else:
            assert decision.retry_after is not None
            clock.now += decision.retry_after
    windows = [sum(start <= time <= start + seconds for time in times) for start in times[:300]]
    # One less where a told time was rounded up.
    assert count - 1 <= max(windows) <= count


# --- fields --------------------------------------------------------------------------------------


class Name(str, Enum):
    """Tenants as an enumeration of texts."""

    ACME = "acme"


class Number(IntEnum):
    """Tenants as an enumeration of numbers."""

    SEVEN = 7


class Disguised(int):
    """A number that shows itself as another."""

    def __repr__(self) -> str:
        return "8"

    __str__ = __repr__


def test_each_tenant_has_a_bucket_of_its_own(clock: FakeClock) -> None:
    limiter = Limiter({"lookup": hourly(2, per=["tenant"])}, clock=clock)
    for tenant in ("acme", "Acme", "acme ", "umbrella", "käufe", "検索", "a" * 1000):
        assert admitted(limiter, "lookup", 5, tenant=tenant) == 2
    assert limiter.snapshot()["lookup"].remaining is None
    assert limiter.snapshot()["lookup"].buckets == 7


def test_r22_a_missing_tenant_has_the_one_bucket_for_missing_and_no_name_is_like_it(
    clock: FakeClock,
) -> None:
    limiter = Limiter({"lookup": hourly(2, per=["tenant"])}, clock=clock)
    assert limiter.try_acquire("lookup").remaining == 1
    assert limiter.try_acquire("lookup", tenant=None).remaining == 0
    missing: list[dict[str, Any]] = [{}, {"tenant": None}, {"other": "acme"}, {"Tenant": "acme"}]
    for fields in missing:
        assert not limiter.try_acquire("lookup", **fields)
    for name in ("", "None", "null", "missing", "default", "\0", "[default]", "tenant", "0"):
        assert admitted(limiter, "lookup", 5, tenant=name) == 2


def test_a_number_is_its_digits_and_an_enumeration_its_value(clock: FakeClock) -> None:
    limiter = Limiter({"lookup": hourly(2, per=["tenant"])}, clock=clock)
    for same in [("7", 7, Number.SEVEN, Disguised(7)), ("acme", Name.ACME), ("-1", -1), (10**40,)]:
        found = [limiter.try_acquire("lookup", tenant=tenant).admitted for tenant in same * 2]
        assert found == [True, True, *([False] * (2 * len(same) - 2))]
    assert admitted(limiter, "lookup", 5, tenant="07") == 2
    assert admitted(limiter, "lookup", 5, tenant=str(10**40)) == 0


@pytest.mark.parametrize(
    "value",
    [True, 1.5, b"acme", ["acme"], {"a": 1}, object(), "\ud800", 10**5000],
    ids=lambda value: type(value).__name__,
)
def test_a_field_that_is_no_name_is_refused_before_anything_changes(
    value: Any, clock: FakeClock
) -> None:
    limiter = Limiter({"lookup": hourly(2, per=["tenant"])}, clock=clock)
    message = "tool 'lookup': field 'tenant' must be a str (of valid Unicode), an int or None, got "
    asking: list[Callable[[], object]] = [
        lambda: limiter.try_acquire("lookup", tenant=value),
        lambda: limiter._admit("lookup", None, Mock(return_value={"tenant": value})),
    ]
    for ask in asking:
        with pytest.raises(ConfigError) as refused:
            ask()
        assert str(refused.value).startswith(message)
        assert len(str(refused.value)) < 200
    assert limiter.snapshot()["lookup"].buckets == 0


def test_what_finds_fields_must_return_a_mapping_of_names(clock: FakeClock) -> None:
    limiter = Limiter({"lookup": hourly(2, per=["tenant"])}, clock=clock)
    no_mapping = "fields must return a mapping of names to values, got"
    no_name = "tool 'lookup': a field's name must be a str, and valid Unicode, got"
    bad: list[tuple[Any, str]] = [
        (None, f"{no_mapping} None"),
        ([("tenant", "a")], f"{no_mapping} [('tenant', 'a')]"),
        ({1: "a"}, f"{no_name} 1"),
        ({None: None}, f"{no_name} None"),
        ({"\ud800": "a"}, f"{no_name} '\\ud800'"),
    ]
    for found, message in bad:
        find: Any = Mock(return_value=found)
        with pytest.raises(ConfigError) as refused:
            limiter._admit("lookup", None, find)
        assert str(refused.value) == message
    assert limiter.snapshot()["lookup"].buckets == 0
    found = MappingProxyType({"tenant": "acme"})
    assert limiter._admit("lookup", None, lambda _context, _names: found) is None
    assert limiter.try_acquire("lookup", tenant="acme").remaining == 0


def test_fields_are_asked_for_where_a_limit_needs_them_and_nowhere_else(clock: FakeClock) -> None:
    limits = {
        "lookup": hourly(9, per=["tenant", "tool"]),
        "all": hourly(9, tools=["lookup", "plain", "crm_*"]),
        "crm_*": hourly(9, per=["user", "tenant"]),
    }
    limiter = Limiter(limits, default=hourly(9, per=["region"]), clock=clock)
    asked: list[tuple[str, ...]] = []

    def find(context: Any, names: tuple[str, ...]) -> dict[str, Any]:
        assert context == "the context"
        asked.append(names)
        return {}

    for tool in ("lookup", "plain", "crm_a", "other"):
        assert limiter._admit(tool, "the context", find) is None
    assert asked == [("tenant",), ("user", "tenant"), ("region",)]
    Limiter({"tool*": hourly(9, per="tool")}, default=hourly(9))._admit("tool", None, find)
    assert len(asked) == 3


TENANT_AND_USER = [
    *(("a:b", "c"), ("a", "b:c"), ("a\0b", "c"), ("a", "b\0c"), ("x\r\nDEL *", "c")),
    *(("{t}", "c"), ("a}b{c", "d"), ("", "c"), (None, "c"), ("default", "c"), ("c", "")),
    *(("c", None), ("", None), (None, ""), ("", ""), (None, None), ("a", "bc"), ("ab", "c")),
]


def test_r22_no_two_combinations_of_fields_share_a_bucket(clock: FakeClock) -> None:
    limiter = Limiter({"lookup": hourly(1, per=["tenant", "user"])}, clock=clock)
    for tenant, user in TENANT_AND_USER:
        assert admitted(limiter, "lookup", 3, tenant=tenant, user=user) == 1
    assert limiter.snapshot()["lookup"].buckets == len(TENANT_AND_USER)


def test_r22_tenants_of_a_mebibyte_that_differ_in_their_last_byte_are_told_apart(
    clock: FakeClock,
) -> None:
    limiter = Limiter({"lookup": hourly(1, per=["tenant"])}, clock=clock)
    long = "t" * (1 << 20)
    for tenant in (long + "a", long + "b", long, long[1:]):
        assert admitted(limiter, "lookup", 3, tenant=tenant) == 1


@given(st.lists(st.tuples(st.none() | st.text(), st.none() | st.text()), unique=True))
def test_r22_any_combinations_of_texts_are_told_apart(
    pairs: list[tuple[str | None, str | None]],
) -> None:
    limiter = Limiter({"lookup": hourly(1, per=["a", "b"])}, clock=lambda: 0.0)
    for first, second in pairs:
        assert limiter.try_acquire("lookup", a=first, b=second)
    for first, second in pairs:
        assert not limiter.try_acquire("lookup", b=second, a=first)


def test_r25_limits_of_one_name_in_two_limiters_are_apart_and_charged_once(
    clock: FakeClock,
) -> None:
    limiters = [Limiter({"search": ToolRateLimit.per_minute(n, n)}, clock=clock) for n in (2, 3)]
    assert [admitted(limiter, "search", 9) for limiter in limiters] == [2, 3]


def test_r25_names_with_separators_are_names(clock: FakeClock) -> None:
    names = ["crm:search", "crm.search", "crm/search", "crm_search", "search"]
    limiter = Limiter({name: hourly(n + 1) for n, name in enumerate(names)}, clock=clock)
    assert [admitted(limiter, name, 9) for name in names] == [1, 2, 3, 4, 5]


# --- many keys -----------------------------------------------------------------------------------


def rss() -> int:
    """The memory that this process holds, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_r24_memory_stays_flat_under_new_tenants_who_do_not_come_again(
    clock: FakeClock,
) -> None:
    limiter = Limiter({"lookup": ToolRateLimit(1000, 1, per=["tenant"])}, clock=clock)
    counts = len(decision_counts())
    kept: list[int] = []
    for start in range(0, 300_000, 10_000):
        for tenant in range(start, start + 10_000):
            limiter.try_acquire("lookup", tenant=tenant)
        # A bucket that was full for ten minutes may go.
        clock.advance(601)
        kept.append(limiter.snapshot()["lookup"].buckets)
    assert max(kept) < 40_000
    assert len(decision_counts()) <= counts + 1


def test_r24_a_blocked_tenant_stays_blocked_while_others_come(clock: FakeClock) -> None:
    limits = {"lookup": hourly(2, per=["tenant"]), "total": hourly(30_000, tools="lookup")}
    limiter = Limiter(limits, clock=clock)
    assert admitted(limiter, "lookup", 3, tenant="blocked") == 2
    for tenant in range(20_000):
        assert limiter.try_acquire("lookup", tenant=tenant)
    assert refused_by(limiter, "lookup", tenant="blocked") == ("lookup", HOUR)
    assert left(limiter)["total"] == 30_000 - 20_002
    # The wider limit holds all the same, whatever tenant comes.
    assert admitted(limiter, "lookup", 20_000, tenant=None) == 2
    assert sum(limiter.try_acquire("lookup", tenant=f"t{n}").admitted for n in range(15_000)) == (
        30_000 - 20_004
    )


def test_looking_makes_no_bucket(clock: FakeClock) -> None:
    limiter = Limiter({"lookup": hourly(2, per=["tenant"])}, clock=clock)
    for _ in range(10):
        assert limiter.snapshot()["lookup"].buckets == 0
        repr(limiter)
    assert not limiter.try_acquire("lookup", tenant="refused", cost=3)
    assert limiter.snapshot()["lookup"].buckets == 0


def test_counts_are_of_two_thousand_tools_and_then_of_all_others_together() -> None:
    said = json.loads(run_program(PROGRAMS / "counts.py"))
    assert 1990 < said["tools"] <= 2000
    # Of 2,500 short names and a long one, all that are not told apart; "_OTHER" is among the tools.
    assert said["others"] == {"admitted": 2501 - (said["tools"] - 1), "rejected_rate": 1}
    assert said["named"] == {"admitted": 1}


def dict_of_counts() -> dict[tuple[str, str | None, str], int]:
    """The counts of the process."""
    return {(tool, limit, outcome): count for tool, limit, outcome, count in decision_counts()}


def test_counts_are_of_a_hundred_limits_of_a_tool_and_then_of_all_others_together(
    clock: FakeClock,
) -> None:
    tool = "rejected by very many limits"
    for number in range(150):
        limiter = Limiter({f"limit {number}": hourly(1, tools=tool)}, clock=clock)
        limiter.try_acquire(tool)
        limiter.try_acquire(tool)
    rejected = {
        limit: count
        for (name, limit, outcome), count in dict_of_counts().items()
        if (name, outcome) == (tool, "rejected_rate")
    }
    assert len(rejected) == 101
    assert rejected.pop("_OTHER") == 50
    assert set(rejected.values()) == {1}


# --- dry run -------------------------------------------------------------------------------------


def test_a_dry_run_lets_all_pass_and_says_what_would_have_been_refused(clock: FakeClock) -> None:
    name = "tried in a dry run"
    limits = {name: ToolRateLimit(1, 2), "wide": hourly(5, tools="*")}
    limiter = Limiter(limits, dry_run=True, clock=clock)
    assert [bool(limiter.try_acquire(name)) for _ in range(2)] == [True, True]
    for _ in range(3):
        overruled = limiter.try_acquire(name)
        assert overruled
        assert overruled.admitted
        assert (overruled.limit, overruled.reason, overruled.retry_after) == (name, "rate", 1.0)
        assert overruled.remaining == 0
    dear = limiter.try_acquire(name, cost=3)
    assert dear
    assert (dear.limit, dear.reason, dear.retry_after) == (name, "cost", None)
    # It spends what an earnest limiter would have spent.
    assert left(limiter) == {name: 0, "wide": 3}
    assert {
        (limit, outcome): count
        for (tool, limit, outcome), count in dict_of_counts().items()
        if tool == name
    } == {
        (None, "admitted"): 2,
        (name, "would_reject_rate"): 3,
        (name, "would_reject_cost"): 1,
    }


@pytest.mark.parametrize("dry_run", [None, 0, 1, "false", [], 0.0], ids=repr)
def test_a_dry_run_is_true_or_false(dry_run: Any, clock: FakeClock) -> None:
    message = f"dry_run must be True or False, got {dry_run!r}"
    with pytest.raises(ConfigError) as refused:
        Limiter({}, dry_run=dry_run)
    assert str(refused.value) == message
    limiter = Limiter({"a": hourly(1)}, clock=clock)
    with pytest.raises(ConfigError) as refused:
        limiter.reload({}, dry_run=dry_run)
    assert str(refused.value) == message
    assert list(limiter.snapshot()) == ["a"]


# --- gone ----------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="memory is told by /proc")
def test_limiters_that_are_dropped_give_their_memory_back() -> None:
    def make() -> None:
        limiter = Limiter({"lookup": hourly(1, per=["tenant"])})
        for tenant in range(20_000):
            limiter.try_acquire("lookup", tenant=tenant)

    make()
    gc.collect()
    before = rss()
    for _ in range(30):
        make()
    gc.collect()
    # One holds about 0.7 MB.
    assert rss() - before < 10_000_000


def test_a_limiter_that_its_own_clock_holds_is_collected_with_its_keys() -> None:
    clock = FakeClock()
    limiter = Limiter({"lookup": hourly(1, per=["tenant"])}, clock=clock)
    clock.limiter = limiter  # type: ignore[attr-defined]
    assert limiter.try_acquire("lookup", tenant="acme")
    gone = weakref.ref(clock)
    del clock, limiter
    gc.collect()
    assert gone() is None


def test_a_finalizer_that_asks_and_reloads_a_limiter_in_the_middle_of_anything(
    clock: FakeClock,
) -> None:
    limiter = Limiter({"lookup": hourly(10**6, per=["tenant"])}, default=hourly(1), clock=clock)
    asked = 0

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            nonlocal asked
            asked += 1
            limiter.try_acquire("lookup", tenant=asked % 10)
            limiter.reload({
                "lookup": hourly(10**6 + asked % 2, per=["tenant"]),
                f"t{asked}": hourly(1),
            })

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for number in range(2000):
            Cycle()
            limiter.try_acquire("lookup", tenant=number)
            limiter.try_acquire(f"t{number}")
            limiter._admit("lookup", number, lambda number, _names: {"tenant": number})
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert asked == 2000
