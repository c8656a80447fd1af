"""`ToolRateLimit` and the errors: what is refused and how it is worded, and how values behave."""

# ruff: noqa: S301, S307 - what is unpickled and evaluated was written here.

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callgate import (
    CallgateError,
    ConfigError,
    Decision,
    Limiter,
    RateLimitExceeded,
    StoreError,
    ToolRateLimit,
)
from callgate._errors import _seconds

from .clocks import FakeClock

OUT_OF_RANGE = "must be from 1 per 366 days to 1,000,000,000 per second, got"
NO_NUMBER = "must be an int or a float, from 1 per 366 days to 1,000,000,000 per second, got"
NO_BURST = "burst must be a whole number from 1 to 4,294,967,295, got"
NO_NAME = (
    "must be names of tools or patterns with * and ?, "
    "without spaces around them and without [, ], { or }, got"
)
NO_FIELD = (
    "must be names of fields, such as 'tenant', without spaces around them "
    "and other than 'cost' and 'max_wait', got"
)
NO_WAIT = "max_wait must be an int or a float, from 0 to 86,400 seconds, got"
NO_CONCURRENCY = "max_concurrent must be a whole number from 1 to 4,294,967,295, got"
NO_RATE = "rate must be N/s, N/min, N/h or N/day with N a number, such as '300/min' or '0.5/s', got"
LARGEST_BURST = 2**32 - 1


class Index:
    """A whole number of another type, as NumPy's are."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value

    def __repr__(self) -> str:
        return f"Index({self.value})"


class Unprintable:
    """A value whose repr fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def refusal(make: Callable[[], Any]) -> str:
    """The message that a value is refused with."""
    with pytest.raises(ConfigError) as refused:
        make()
    assert isinstance(refused.value, ValueError)
    assert isinstance(refused.value, CallgateError)
    return str(refused.value)


# --- rates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rate",
    [
        0,
        0.0,
        -0.0,
        -1,
        -0.5,
        5e-324,
        3.1e-8,
        1_000_000_001,
        1e10,
        1e308,
        10**30,
        -(10**30),
        Index(0),
    ],
    ids=repr,
)
def test_r01_r04_a_rate_of_zero_or_out_of_range_is_refused_not_unlimited(rate: Any) -> None:
    assert refusal(lambda: ToolRateLimit(rate, 1)) == f"requests_per_second {OUT_OF_RANGE} {rate!r}"


@pytest.mark.parametrize("rate", [math.nan, math.inf, -math.inf])
def test_r04_a_rate_that_is_not_finite_is_refused(rate: float) -> None:
    assert refusal(lambda: ToolRateLimit(rate, 1)) == f"requests_per_second {OUT_OF_RANGE} {rate!r}"
    assert (
        refusal(lambda: ToolRateLimit.per_minute(rate, 1))
        == f"requests_per_minute {OUT_OF_RANGE} {rate!r}"
    )


@pytest.mark.parametrize(
    "rate",
    [True, False, None, "2", b"2", [2], 2j, Decimal(2), Fraction(1, 2), ToolRateLimit(1, 1)],
    ids=repr,
)
def test_r04_a_rate_that_is_no_number_is_refused_and_so_is_a_bool(rate: Any) -> None:
    assert refusal(lambda: ToolRateLimit(rate, 1)) == f"requests_per_second {NO_NUMBER} {rate!r}"
    assert (
        refusal(lambda: ToolRateLimit.per_minute(rate, 1))
        == f"requests_per_minute {NO_NUMBER} {rate!r}"
    )


def test_the_range_of_rates_ends_where_the_message_says() -> None:
    slowest = 1 / (366 * 86_400)
    assert ToolRateLimit(1_000_000_000, 1).requests_per_second == 1e9
    assert ToolRateLimit(1e9, 1) == ToolRateLimit(1_000_000_000, 1)
    assert ToolRateLimit(math.nextafter(slowest, 1), 1).requests_per_second == math.nextafter(
        slowest, 1
    )
    refusal(lambda: ToolRateLimit(math.nextafter(1e9, math.inf), 1))
    refusal(lambda: ToolRateLimit(math.nextafter(slowest, 0) * (1 - 1e-12), 1))
    assert ToolRateLimit.per_minute(60e9, 1) == ToolRateLimit(1e9, 1)
    refusal(lambda: ToolRateLimit.per_minute(60e9 + 1, 1))


@pytest.mark.parametrize(
    "rate",
    [
        "",
        "300",
        "300/",
        "/min",
        "-5/min",
        "+5/s",
        "nan/s",
        "inf/s",
        "300/minute",
        "300/m",
        "10/week",
        "1/year",
        "1/S",
        "1,000/s",
        "1_000/s",
        "1234567890123456789/s",
        "\uff11/s",
    ],
    ids=ascii,
)
def test_a_written_rate_that_cannot_be_read_is_refused(rate: str) -> None:
    assert refusal(lambda: ToolRateLimit.parse(rate, 1)) == f"{NO_RATE} {rate!r}"


@pytest.mark.parametrize(
    "rate", ["0/s", "0.0/min", "0.002732/day", "1000000001/s", "60000000001/min"]
)
def test_r01_a_written_rate_out_of_range_is_refused(rate: str) -> None:
    assert refusal(lambda: ToolRateLimit.parse(rate, 1)) == f"rate {OUT_OF_RANGE} {rate!r}"


@pytest.mark.parametrize("rate", [300, 300.0, None, True, b"300/min"], ids=ascii)
def test_a_written_rate_that_is_no_text_is_refused(rate: Any) -> None:
    expected = f"rate must be a string such as '300/min' or '0.5/s', got {rate!r}"
    assert refusal(lambda: ToolRateLimit.parse(rate, 1)) == expected


# --- bursts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "burst",
    [
        *(0, -1, -(2**70), LARGEST_BURST + 1, 2**64, 2**70, Index(0)),
        *(0.5, 1.0, 2.5, math.nan, math.inf, True, False, None, "1", b"1", [1], Decimal(1)),
    ],
    ids=repr,
)
def test_r01_r04_r05_a_burst_that_is_no_whole_number_in_range_is_refused(burst: Any) -> None:
    for make in (
        lambda: ToolRateLimit(1, burst),
        lambda: ToolRateLimit.per_minute(1, burst),
        lambda: ToolRateLimit.parse("1/s", burst),
    ):
        assert refusal(make) == f"{NO_BURST} {burst!r}"


def test_the_largest_burst_and_whole_numbers_of_other_types_are_taken() -> None:
    assert ToolRateLimit(1, LARGEST_BURST).burst == LARGEST_BURST
    two: Any = Index(2)
    assert ToolRateLimit(two, Index(3)) == ToolRateLimit(2, 3)


def test_a_refused_value_is_shown_shortened_where_it_is_long() -> None:
    text: Any = "x" * 1000
    message = refusal(lambda: ToolRateLimit(text, 1))
    assert message.endswith(f"got '{'x' * 79}…")


def test_a_value_whose_repr_fails_is_refused_all_the_same() -> None:
    value: Any = Unprintable()
    assert "Unprintable" in refusal(lambda: ToolRateLimit(value, 1))


@pytest.mark.parametrize(
    ("make", "arguments", "named", "word"),
    [
        (ToolRateLimit, (), {}, "requests_per_second"),
        (ToolRateLimit, (1,), {}, "burst"),
        (ToolRateLimit, (1, 1, 1), {}, "positional"),
        (ToolRateLimit, (1,), {"burts": 1}, "burts"),
        (ToolRateLimit.parse, ("1/s",), {}, "burst"),
        (ToolRateLimit.per_minute, (1,), {}, "burst"),
    ],
    ids=str,
)
def test_a_missing_or_misspelt_argument_is_a_type_error_that_names_it(
    make: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any], word: str
) -> None:
    with pytest.raises(TypeError, match=word):
        make(*arguments, **named)


# --- tools, fields, waiting, concurrency and cost ------------------------------------------------

Make = Callable[..., ToolRateLimit]

MAKERS: list[tuple[Make, str]] = [
    (partial(ToolRateLimit, 1, 5), "per"),
    (partial(ToolRateLimit.per_minute, 1, 5), "per"),
    (partial(ToolRateLimit.parse, "1/s", 5), "per"),
    (partial(ToolRateLimit.quota, 50, "min"), "fields"),
]
every_maker = pytest.mark.parametrize(
    ("make", "per"), MAKERS, ids=["new", "per_minute", "parse", "quota"]
)


@every_maker
def test_a_limit_keeps_its_tools_fields_and_cost(make: Make, per: str) -> None:
    bare = make()
    assert (bare.tools, bare.per, bare.cost) == (None, (), 1)
    assert make(tools=None, cost=1, **{per: []}) == bare

    full = make(tools=["crm_*", "lookup"], cost=3, **{per: ("tenant", "tool")})
    assert (full.tools, full.per, full.cost) == (("crm_*", "lookup"), ("tenant", "tool"), 3)
    assert full == make(tools=iter(["crm_*", "lookup"]), cost=Index(3), **{per: ["tenant", "tool"]})
    # One name alone is one name, and not its letters.
    assert make(tools="crm_*", **{per: "tenant"}) == make(tools=["crm_*"], **{per: ["tenant"]})


@every_maker
@pytest.mark.parametrize("name", ["", " ", " a", "a ", "[ab]", "crm_[ab]", "{a,b}", "a}", "\t"])
def test_a_bad_name_among_tools_is_shown_without_the_others(
    make: Make, per: str, name: str
) -> None:
    assert refusal(lambda: make(tools=["good", name, "*"])) == f"tools {NO_NAME} {name!r}"


@every_maker
@pytest.mark.parametrize("name", ["", " ", " tenant", "tenant ", "cost", "max_wait"])
def test_a_bad_field_is_shown_without_the_others(make: Make, per: str, name: str) -> None:
    assert refusal(lambda: make(**{per: ["tenant", name]})) == f"{per} {NO_FIELD} {name!r}"


@every_maker
@pytest.mark.parametrize(
    ("value", "message"),
    [
        *((value, f"must be a name or a list of names, got {value!r}") for value in (5, 1.5, True)),
        ([5], "must be a str, got 5"),
        (["a", None], "must be a str, got None"),
        (b"a", "must be a str, got 97"),
        ([["a"]], "must be a str, got ['a']"),
        ("\ud800", "must be valid Unicode, got '\\ud800'"),
        (["a", "\ud800"], "must be valid Unicode, got '\\ud800'"),
    ],
    ids=ascii,
)
def test_names_that_are_no_list_of_texts_are_refused(
    make: Make, per: str, value: Any, message: str
) -> None:
    for field in ("tools", per):
        refused = refusal(partial(make, **{field: value}))
        assert refused in (f"{field} {message}", f"each of {field} {message}")


@every_maker
def test_fields_are_left_out_by_none_of_them_and_not_by_none(make: Make, per: str) -> None:
    assert make(**{per: []}) == make()
    assert refusal(lambda: make(**{per: None})) == (
        f"{per} must be a name or a list of names, got None"
    )


@every_maker
def test_no_tools_and_a_name_twice_are_refused(make: Make, per: str) -> None:
    assert refusal(lambda: make(tools=[])) == "tools must be at least one name, got []"
    for field in ("tools", per):
        assert refusal(partial(make, **{field: ["a", "b", "a"]})) == (
            f"{field} must be names that are all different, got ['a', 'b', 'a']"
        )


@every_maker
def test_an_error_while_names_are_listed_comes_out(make: Make, per: str) -> None:
    def names() -> Iterator[str]:
        yield "a"
        raise OSError("no more")

    for field in ("tools", per):
        with pytest.raises(OSError, match="no more"):
            make(**{field: names()})


@every_maker
@pytest.mark.parametrize("cost", [0, -1, 6, 2**64, 2**70, 1.0, True, None, "1", math.nan], ids=repr)
def test_r04_r05_a_cost_that_no_call_can_have_is_refused(make: Make, per: str, cost: Any) -> None:
    message = f"cost must be a whole number from 1 to 5 (at most the burst), got {cost!r}"
    assert refusal(lambda: make(cost=cost)) == message


@every_maker
def test_a_limit_keeps_how_long_calls_may_wait_and_how_many_may_run(make: Make, per: str) -> None:
    bare = make()
    assert (bare.max_wait, bare.max_concurrent) == (0.0, None)
    assert make(max_wait=0, max_concurrent=None) == make(max_wait=-0.0) == bare

    full = make(max_wait=1.5, max_concurrent=4, **{per: "tenant"})
    assert (full.max_wait, full.max_concurrent) == (1.5, 4)
    assert full == make(max_wait=3 / 2, max_concurrent=Index(4), **{per: ["tenant"]})
    assert make(max_wait=Index(2)) == make(max_wait=2) == make(max_wait=2.0)
    assert make(max_concurrent=LARGEST_BURST).max_concurrent == LARGEST_BURST


def test_a_wait_counts_in_whole_nanoseconds_up_to_a_day() -> None:
    for wait, kept in [
        (1e-9, 1e-9),
        (0.4e-9, 0.0),
        (0.6e-9, 1e-9),
        (5e-324, 0.0),
        (0.1, 0.1),
        (1 / 3, 0.333333333),
        (86_399.999999999, 86_399.999999999),
        (86_400, 86_400.0),
        (86_400.0, 86_400.0),
    ]:
        assert ToolRateLimit(1, 5, max_wait=wait).max_wait == kept
    assert ToolRateLimit(1, 5, max_wait=0.1 + 0.2) == ToolRateLimit(1, 5, max_wait=0.3)


@every_maker
@pytest.mark.parametrize(
    "wait",
    [
        *(-1, -1.0, -5e-324, -(2**70), 86_401, math.nextafter(86_400, math.inf), 2**64, 2**70),
        *(1e300, math.nan, math.inf, -math.inf, True, False, None, "2", "2s", b"2", [2], 2j),
        *(Decimal(2), Fraction(1, 2), Index(-1)),
    ],
    ids=repr,
)
def test_r04_a_wait_that_no_call_can_have_is_refused(make: Make, per: str, wait: Any) -> None:
    assert refusal(lambda: make(max_wait=wait)) == f"{NO_WAIT} {wait!r}"


@every_maker
@pytest.mark.parametrize(
    "calls",
    [0, -1, -0.0, 1.0, 0.5, LARGEST_BURST + 1, 2**64, 2**70, math.nan, math.inf, True, False, "4"],
    ids=repr,
)
def test_r04_a_number_of_calls_that_cannot_run_is_refused(make: Make, per: str, calls: Any) -> None:
    assert refusal(lambda: make(max_concurrent=calls)) == f"{NO_CONCURRENCY} {calls!r}"


# --- quotas --------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["s", "min", "day"])
def test_a_unit_of_time_is_no_field(unit: str) -> None:
    with pytest.raises(ConfigError, match=r"^per must be the fields .* not a unit of time"):
        ToolRateLimit(300, burst=20, per=unit)
    with pytest.raises(ConfigError, match=r"^fields must be the fields"):
        ToolRateLimit.quota(300, per="min", fields=unit)
    assert ToolRateLimit(1, 1, per=[unit]).per == (unit,)


def test_a_quota_is_refilled_with_what_its_burst_leaves_of_it() -> None:
    quota = ToolRateLimit.quota
    assert [quota(count, "min").burst for count in (2, 19, 20, 100, 12_345)] == [1, 1, 2, 10, 1234]
    assert quota(100, per="min", burst=40).requests_per_second == 1.0
    assert quota(3601, "h", 1).requests_per_second == 1.0
    assert quota(100, "min", None) == quota(100, "min", 10)
    # As it was asked for: not the same as its bucket.
    assert quota(100, "min", 40) != ToolRateLimit(1, 40)


@pytest.mark.parametrize("count", [1, 0, -5, -(2**70), 2.0, 100.5, True, None, "100"], ids=repr)
def test_r04_a_quota_that_is_no_whole_number_from_two_is_refused(count: Any) -> None:
    assert refusal(lambda: ToolRateLimit.quota(count, "min")) == (
        "count must be a whole number of at least 2 (for 1, ask for a rate of 1 with burst 1), "
        f"got {count!r}"
    )


@pytest.mark.parametrize(
    "per", ["minute", "m", "", "S", "week", 60, None, True, "\ud800", ["tenant"]], ids=ascii
)
def test_a_quota_of_an_unknown_unit_is_refused(per: Any) -> None:
    assert refusal(lambda: ToolRateLimit.quota(100, per)) == (
        "per must be the quota's unit of time, 's', 'min', 'h' or 'day' "
        f"(the fields that split it are `fields`), got {per!r}"
    )


@pytest.mark.parametrize("burst", [0, -1, 1.5, True, "10", math.inf], ids=repr)
def test_r04_a_quotas_burst_that_is_no_whole_number_is_refused(burst: Any) -> None:
    message = f"burst must be a whole number, at least 1 and below the quota, got {burst!r}"
    assert refusal(lambda: ToolRateLimit.quota(100, "min", burst)) == message


@pytest.mark.parametrize(
    ("count", "per", "burst", "message"),
    [
        (100, "min", 100, "burst must be a whole number from 1 to 99 (below the quota), got 100"),
        (2, "s", 2, "burst must be a whole number from 1 to 1 (below the quota), got 2"),
        (10**9 + 2, "s", 1, f"rate {OUT_OF_RANGE} 1000000001 per second"),
        # What it would bring along by itself is out of range as well.
        (
            10**11,
            "day",
            None,
            f"{NO_BURST[: -len(', got')]} (below the quota), got 10000000000",
        ),
    ],
    ids=str,
)
def test_a_quota_is_refused_by_what_is_out_of_range(
    count: int, per: Any, burst: int | None, message: str
) -> None:
    assert refusal(lambda: ToolRateLimit.quota(count, per, burst)) == message
    assert ToolRateLimit.quota(10**11, "day", LARGEST_BURST).burst == LARGEST_BURST


# --- values --------------------------------------------------------------------------------------


def test_the_same_limit_written_three_ways_is_equal() -> None:
    limits = {
        ToolRateLimit(5, 20),
        ToolRateLimit.per_minute(300, burst=20),
        ToolRateLimit.parse("300/min", burst=20),
    }
    assert limits == {ToolRateLimit(requests_per_second=5.0, burst=20)}


def test_the_same_limit_written_in_a_file_is_equal(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(
        "[limits.search]\nrate = '300/min'\nburst = 20\nmax_wait = '1500ms'\nmax_concurrent = 4\n"
    )
    limit = ToolRateLimit(5, 20, max_wait=1.5, max_concurrent=4)
    assert Limiter.from_file(file).snapshot()["search"].limit == limit


def test_limits_differ_by_rate_and_by_burst_and_from_other_types() -> None:
    limit = ToolRateLimit(5, 20)
    assert limit != ToolRateLimit(5, 21)
    assert limit != ToolRateLimit(6, 20)
    assert limit != (5, 20)
    with pytest.raises(TypeError):
        sorted([limit, ToolRateLimit(6, 20)])  # type: ignore[type-var]


@pytest.mark.parametrize("unit", ["s", "min", "h", "day"])
def test_a_float_means_its_shortest_decimal_not_its_binary_neighbour(unit: str) -> None:
    assert ToolRateLimit.parse("1/s", 1) == ToolRateLimit(1, 1)
    assert ToolRateLimit.parse(f"0.10/{unit}", 1) == ToolRateLimit.parse(f"0.1/{unit}", 1)
    assert (
        ToolRateLimit(0.1, 1) == ToolRateLimit.parse("6/min", 1) == ToolRateLimit.parse("360/h", 1)
    )
    assert ToolRateLimit(0.1 + 0.2, 1) != ToolRateLimit(0.3, 1)
    assert ToolRateLimit(0.1, 1).requests_per_second == 0.1


def test_limits_differ_by_all_that_they_are_given() -> None:
    limits = [
        *(ToolRateLimit(5, 20), ToolRateLimit(5, 20, cost=2)),
        *(ToolRateLimit(5, 20, max_wait=wait) for wait in (1e-9, 2)),
        *(ToolRateLimit(5, 20, max_concurrent=calls) for calls in (1, LARGEST_BURST)),
        *(ToolRateLimit(5, 20, tools=names) for names in (["a"], ["a", "b"], ["b", "a"])),
        *(ToolRateLimit(5, 20, per=names) for names in (["a"], ["a", "b"])),
    ]
    assert len(set(limits)) == len(limits)


def test_a_limit_cannot_be_changed_nor_subclassed() -> None:
    limit = ToolRateLimit(5, 20)
    for name in (
        *("requests_per_second", "burst", "tools", "per", "max_wait", "max_concurrent", "cost"),
        "other",
    ):
        with pytest.raises(AttributeError):
            setattr(limit, name, 1)
    with pytest.raises(TypeError):
        type("Other", (ToolRateLimit,), {})
    assert (limit.requests_per_second, limit.burst) == (5.0, 20)


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (ToolRateLimit(2, 3), "ToolRateLimit(requests_per_second=2, burst=3)"),
        (ToolRateLimit(0.1, 1), "ToolRateLimit(requests_per_second=0.1, burst=1)"),
        (ToolRateLimit.per_minute(300, 20), "ToolRateLimit(requests_per_second=5, burst=20)"),
        (ToolRateLimit.per_minute(100, 5), "ToolRateLimit.parse('100/min', burst=5)"),
        (ToolRateLimit.parse("1/day", 1), "ToolRateLimit.parse('1/day', burst=1)"),
        (
            ToolRateLimit(1e9, LARGEST_BURST),
            "ToolRateLimit(requests_per_second=1000000000, burst=4294967295)",
        ),
        (
            ToolRateLimit(2, 3, tools=["a*", "it's"], per="tenant", cost=2),
            (
                "ToolRateLimit(requests_per_second=2, burst=3, "
                """tools=('a*', "it's"), per=('tenant',), cost=2)"""
            ),
        ),
        (
            ToolRateLimit(2, 3, max_wait=2, max_concurrent=4, per="tenant", cost=2),
            (
                "ToolRateLimit(requests_per_second=2, burst=3, per=('tenant',), "
                "max_wait=2.0, max_concurrent=4, cost=2)"
            ),
        ),
        (
            ToolRateLimit(2, 3, max_wait=1e-9),
            "ToolRateLimit(requests_per_second=2, burst=3, max_wait=1e-9)",
        ),
        (ToolRateLimit.quota(100, "min"), "ToolRateLimit.quota(100, per='min', burst=10)"),
        (
            ToolRateLimit.quota(100, "day", 1, tools="a", fields=["x", "y"]),
            "ToolRateLimit.quota(100, per='day', burst=1, tools=('a',), fields=('x', 'y'))",
        ),
    ],
)
def test_a_repr_is_short_and_can_be_pasted_back(limit: ToolRateLimit, text: str) -> None:
    assert repr(limit) == text
    assert eval(text) == limit


UNITS = st.sampled_from(["s", "min", "h", "day"])
NAMES = st.text(min_size=1).filter(
    lambda name: name.strip() == name and not set(name) & set("[]{}")
)
TOOLS = st.lists(NAMES, min_size=1, unique=True)
FIELDS = st.lists(NAMES.filter(lambda name: name not in ("cost", "max_wait")), unique=True)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "tools": TOOLS,
        "per": FIELDS,
        "max_wait": st.floats(0, 86_400) | st.integers(0, 86_400),
        "max_concurrent": st.none() | st.integers(1, LARGEST_BURST),
        "cost": st.integers(1, 7),
    },
)


def limit_with(options: dict[str, Any], burst: int) -> ToolRateLimit:
    """A limit with options."""
    return ToolRateLimit(1, burst, **options)


def quota_with(options: dict[str, Any], count: int, unit: Any) -> ToolRateLimit:
    """A quota with the same options, but for the cost."""
    given = {key: value for key, value in options.items() if key not in ("per", "cost")}
    return ToolRateLimit.quota(count, unit, fields=options.get("per", ()), **given)


LIMITS = st.one_of(
    st.builds(limit_with, OPTIONS, st.integers(7, LARGEST_BURST)),
    st.builds(quota_with, OPTIONS, st.integers(2, 10**9), UNITS),
    st.builds(
        ToolRateLimit, st.floats(3.2e-8, 1e9) | st.integers(1, 10**9), st.integers(1, LARGEST_BURST)
    ),
    st.builds(ToolRateLimit.per_minute, st.floats(1.92e-6, 6e10), st.integers(1, LARGEST_BURST)),
    st.builds(
        ToolRateLimit.parse,
        st.builds("{}/{}".format, st.integers(1, 10**9), UNITS),
        st.integers(1, LARGEST_BURST),
    ),
)


@given(LIMITS)
def test_any_limit_survives_repr_pickle_and_copy(limit: ToolRateLimit) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(limit, protocol)) == limit
    for same in (eval(repr(limit)), copy.copy(limit), copy.deepcopy(limit)):
        assert same == limit
        assert hash(same) == hash(limit)
        assert repr(same) == repr(limit)


@given(st.floats(3.2e-8, 1e9))
def test_a_rate_reads_back_as_the_float_it_was_given_as(rate: float) -> None:
    assert ToolRateLimit(rate, 1).requests_per_second == rate


# --- errors --------------------------------------------------------------------------------------


def rejection(
    limit: ToolRateLimit, *, cost: int = 1, spend: int = 0, tool: str = "search"
) -> Decision:
    """The decision on a call that its limit rejects."""
    limiter = Limiter({tool: limit}, clock=FakeClock())
    for _ in range(spend):
        assert limiter.try_acquire(tool)
    decision = limiter.try_acquire(tool, cost=cost)
    assert not decision
    return decision


def test_the_errors_are_of_one_family() -> None:
    assert issubclass(ConfigError, CallgateError)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(StoreError, CallgateError)
    assert issubclass(RateLimitExceeded, CallgateError)
    assert not issubclass(RateLimitExceeded, ValueError)
    for error in (CallgateError, ConfigError, StoreError, RateLimitExceeded):
        assert error.__module__ == "callgate"


@pytest.mark.parametrize(
    ("rate", "wait"),
    [
        ("1/s", "1 second"),
        ("2/s", "0.5 seconds"),
        ("3/s", "0.334 seconds"),
        ("0.1/s", "10 seconds"),
        ("7/min", "8.572 seconds"),
        ("5/min", "12 seconds"),
        ("7/h", "515 seconds"),
        ("1/day", "86400 seconds"),
        ("1000000/s", "0.001 seconds"),
        ("0.003/day", "28800000 seconds"),
    ],
)
def test_a_rejection_says_which_tool_and_when_to_retry_rounded_up(rate: str, wait: str) -> None:
    decision = rejection(ToolRateLimit.parse(rate, 1), spend=1)
    error = RateLimitExceeded(decision)
    assert str(error) == f"Rate limit exceeded for tool 'search'. Retry in {wait}."
    assert error.decision is decision


def test_r05_a_call_dearer_than_the_burst_is_told_never_to_retry() -> None:
    error = RateLimitExceeded(rejection(ToolRateLimit(1, 5), cost=6))
    assert str(error) == (
        "Rate limit exceeded for tool 'search'. "
        "The call costs more than the limit can ever admit: do not retry it."
    )


@given(st.floats(1e-9, 4e7))
def test_the_told_wait_is_never_less_than_the_wait(wait: float) -> None:
    told = _seconds(wait)
    number, unit = told.split(" ")
    assert unit == ("second" if number == "1" else "seconds")
    # A billionth is lost in writing, a thousandth or a second is gained at most.
    assert wait - 1e-9 <= float(number) <= wait + (0.001 if wait < 9.999 else 1)


def test_a_rejection_travels_between_processes() -> None:
    error = RateLimitExceeded(rejection(ToolRateLimit(3, 1), spend=1))
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is RateLimitExceeded
    assert str(back) == str(error)
    assert repr(back.decision) == repr(error.decision)
    assert back.decision.retry_after == error.decision.retry_after


def test_an_error_of_configuration_travels_between_processes() -> None:
    with pytest.raises(ConfigError) as refused:
        ToolRateLimit(0, 1)
    back = pickle.loads(pickle.dumps(refused.value))
    assert type(back) is ConfigError
    assert str(back) == str(refused.value)
