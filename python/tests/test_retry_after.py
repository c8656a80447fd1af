"""How long an HTTP error asks to stay away: by its shape, and whatever it holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from email.utils import formatdate
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import requests
from hypothesis import example, given
from hypothesis import strategies as st

from callgate import _retry_after
from callgate._retry_after import retry_after

from .clocks import FakeClock

NOW = 784_111_777
"""Seconds since 1970: the moment that RFC 9110 takes for its dates."""

DATES = [
    "Sun, 06 Nov 1994 08:49:37 GMT",
    "Sunday, 06-Nov-94 08:49:37 GMT",
    "Sun Nov  6 08:49:37 1994",
]
"""That moment in the three forms of an HTTP date."""

Raise = Callable[[int, Mapping[str, str]], Exception]


def of_httpx(status: int, headers: Mapping[str, str]) -> Exception:
    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(status, headers=headers)

    with httpx2.Client(transport=httpx2.MockTransport(answer)) as client:
        response = client.get("http://crm.test/")
    with pytest.raises(httpx2.HTTPStatusError) as caught:
        response.raise_for_status()
    return caught.value


def of_requests(status: int, headers: Mapping[str, str]) -> Exception:
    response = requests.Response()
    response.status_code = status
    response.headers.update(headers)
    with pytest.raises(requests.HTTPError) as caught:
        response.raise_for_status()
    return caught.value


class Shaped(Exception):
    """An error with a response of any kind."""

    def __init__(self, response: Any) -> None:
        super().__init__("refused")
        self.response = response


def shaped(status: Any, headers: Any) -> Exception:
    return Shaped(SimpleNamespace(status_code=status, headers=headers))


@pytest.fixture(params=[of_httpx, of_requests, shaped])
def error(request: pytest.FixtureRequest) -> Raise:
    """Makes the error that a library raises."""
    made: Raise = request.param
    return made


@pytest.fixture(autouse=True)
def wall_clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The machine's."""
    clock = FakeClock(NOW)
    monkeypatch.setattr(_retry_after, "time", clock)
    return clock


@pytest.fixture
def _far_from_utc() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "JST-9")
        time.tzset()
        yield
    time.tzset()


# --- the two forms -------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, HTTPStatus.SERVICE_UNAVAILABLE])
@pytest.mark.parametrize("name", ["Retry-After", "retry-after", "RETRY-AFTER"])
def test_seconds_are_read_whatever_the_case_of_the_name(
    error: Raise, status: int, name: str
) -> None:
    assert retry_after(error(status, {"Content-Length": "0", name: "7"})) == 7


@pytest.mark.usefixtures("_far_from_utc")
@pytest.mark.parametrize("text", DATES)
def test_a_date_is_measured_against_the_services_own_clock(
    error: Raise, text: str, wall_clock: FakeClock
) -> None:
    wall_clock.advance(-1000)
    for early, expected in ((90, 90), (0, None), (-90, None)):
        headers = {"Retry-After": text, "Date": formatdate(NOW - early, usegmt=True)}
        assert retry_after(error(429, headers)) == expected


@pytest.mark.parametrize(
    "said", [{}, {"Date": "today"}, {"Date": "Sun, 06 Nov 99999 08:49:37 GMT"}]
)
def test_a_date_is_measured_against_the_wall_clock_where_the_service_tells_no_time(
    error: Raise, said: dict[str, str], wall_clock: FakeClock
) -> None:
    for early, expected in ((0.5, 0.5), (0, None), (-1, None)):
        wall_clock.now = NOW - early
        assert retry_after(error(503, {"Retry-After": DATES[0], **said})) == expected


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1.5", 1.5),
        ("007", 7),
        (" 7\t", 7),
        ("86400", 86_400),
        ("86401", 86_400),
        ("9" * 5_000, 86_400),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 86_400),
        ("0", None),
        ("0.000", None),
        ("0." + "0" * 400 + "1", None),
        ("-1", None),
        ("+1", None),
        ("1e3", None),
        ("1_000", None),
        ("1.", None),
        ("1 s", None),
        ("1, 1", None),
        ("٣", None),
        ("nan", None),
        ("inf", None),
        ("", None),
        ("soon", None),
        ("Sun, 06 Nov 1994 08:49:61 GMT", None),
        ("Sun, 06 Nov 2094 08:49:37 +9999", None),
    ],
)
def test_odd_values_are_capped_or_no_answer(text: str, seconds: float | None) -> None:
    assert retry_after(shaped(429, {"Retry-After": text})) == seconds


def test_an_answer_with_another_status_or_without_the_header_asks_for_nothing(
    error: Raise,
) -> None:
    assert retry_after(error(429, {"Content-Length": "0"})) is None
    for status in (400, 404, 500, 502):
        assert retry_after(error(status, {"Retry-After": "7"})) is None


EPOCH_TO_9999 = st.integers(0, 253_402_300_799)
HTTP_DATES = EPOCH_TO_9999.map(lambda seconds: formatdate(seconds, usegmt=True))
NUMBERS = st.from_regex(r"-?[0-9]{1,400}(\.[0-9]{1,400})?", fullmatch=True)
TEXTS = st.one_of(st.text(), NUMBERS, HTTP_DATES, st.text("0123456789 :,-+JanSunGMT"))


@given(text=TEXTS, date=st.none() | TEXTS)
@example(text="9" * 5_000, date=None)
@example(text="inf", date="nan")
def test_no_text_raises_or_gives_a_pause_out_of_range(text: str, date: str | None) -> None:
    headers = {"Retry-After": text} if date is None else {"Retry-After": text, "Date": date}
    seconds = retry_after(shaped(503, headers))
    assert seconds is None or 0 < seconds <= 86_400


# --- hostile shapes ------------------------------------------------------------------------------


class WithoutResponse(Exception):
    @property
    def response(self) -> Any:
        raise RuntimeError("The .response property has not been set.")


class WithoutStatus:
    @property
    def status_code(self) -> int:
        raise RuntimeError("no status")


class WithoutHeaders:
    status_code = 429

    @property
    def headers(self) -> Mapping[str, str]:
        raise RuntimeError("no headers")


@pytest.mark.parametrize(
    "error",
    [
        Exception("plain"),
        WithoutResponse(),
        Shaped(None),
        Shaped({"status_code": 429}),
        Shaped(WithoutStatus()),
        Shaped(WithoutHeaders()),
        shaped("429", {"Retry-After": "7"}),
        shaped(True, {"Retry-After": "7"}),
        shaped(None, {"Retry-After": "7"}),
        shaped(429, None),
        shaped(429, ["Retry-After", "7"]),
        shaped(429, {"Retry-After": 7}),
        shaped(429, {"Retry-After": b"7"}),
        shaped(429, {b"Retry-After": "7"}),
        shaped(429, {"Retry-After": None}),
    ],
)
def test_another_shape_is_no_answer_and_no_error(error: Exception) -> None:
    assert retry_after(error) is None
    # Nor does it hide what it wraps.
    error.__cause__ = shaped(429, {"Retry-After": "7"})
    assert retry_after(error) == 7


def test_an_error_may_keep_even_its_cause_to_itself() -> None:
    class Sealed(Exception):
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

    assert retry_after(wrapped(1, Sealed())) is None


def test_other_headers_may_be_of_any_kind() -> None:
    assert retry_after(shaped(429, {1: 2, b"date": b"x", "Retry-After": "7", "Date": b"x"})) == 7


def test_what_stops_a_program_is_let_through() -> None:
    class Stopped(Exception):
        @property
        def response(self) -> Any:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        retry_after(Stopped())


# --- wrapped -------------------------------------------------------------------------------------


def wrapped(times: int, error: BaseException) -> BaseException:
    """An error around an error, so many times."""
    for _ in range(times):
        wrapper = Exception("wrapper")
        wrapper.__cause__ = error
        error = wrapper
    return error


def test_a_cause_and_a_context_that_is_not_suppressed_are_asked(error: Raise) -> None:
    inner = error(429, {"Retry-After": "7"})

    def throw() -> None:
        raise inner

    def fail(how: str) -> None:
        try:
            throw()
        except Exception as caught:
            if how == "cause":
                raise ValueError("outer") from caught
            if how == "none":
                raise ValueError("outer") from None
            raise ValueError("outer")  # noqa: B904 - the context, on purpose

    for how, expected in (("cause", 7), ("context", 7), ("none", None)):
        with pytest.raises(ValueError, match="outer") as outer:
            fail(how)
        assert retry_after(outer.value) == expected


def test_the_outermost_error_that_asks_is_heard() -> None:
    outer = shaped(503, {"Retry-After": "2"})
    outer.__cause__ = shaped(429, {"Retry-After": "7"})
    assert retry_after(wrapped(1, outer)) == 2


def test_ten_errors_of_a_chain_are_asked() -> None:
    inner = shaped(429, {"Retry-After": "7"})
    assert retry_after(wrapped(9, inner)) == 7
    assert retry_after(wrapped(10, inner)) is None


def test_a_chain_may_be_a_loop() -> None:
    inner = Exception("inner")
    outer = wrapped(2, inner)
    inner.__context__ = outer
    assert retry_after(outer) is None
