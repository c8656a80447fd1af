"""`ToolRateLimit` and the errors: what is refused and how it is worded, and how values behave."""

# ruff: noqa: S301, S307 - what is unpickled and evaluated was written here.

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
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


# --- values --------------------------------------------------------------------------------------


def test_the_same_limit_written_three_ways_is_equal() -> None:
    limits = {
        ToolRateLimit(5, 20),
        ToolRateLimit.per_minute(300, burst=20),
        ToolRateLimit.parse("300/min", burst=20),
    }
    assert limits == {ToolRateLimit(requests_per_second=5.0, burst=20)}


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


def test_a_limit_cannot_be_changed_nor_subclassed() -> None:
    limit = ToolRateLimit(5, 20)
    for name in ("requests_per_second", "burst", "other"):
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
    ],
)
def test_a_repr_is_short_and_can_be_pasted_back(limit: ToolRateLimit, text: str) -> None:
    assert repr(limit) == text
    assert eval(text) == limit


LIMITS = st.one_of(
    st.builds(
        ToolRateLimit, st.floats(3.2e-8, 1e9) | st.integers(1, 10**9), st.integers(1, LARGEST_BURST)
    ),
    st.builds(ToolRateLimit.per_minute, st.floats(1.92e-6, 6e10), st.integers(1, LARGEST_BURST)),
    st.builds(
        ToolRateLimit.parse,
        st.builds("{}/{}".format, st.integers(1, 10**9), st.sampled_from(["s", "min", "h", "day"])),
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
