"""How long an HTTP error asks to stay away.

An error is known by its shape, so that no HTTP library is needed: ``error.response`` with a
``status_code`` and ``headers``, as httpx, requests and the SDKs built on them raise it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from datetime import timezone
from email.utils import parsedate_to_datetime
from time import time
from typing import Any, TypeVar

_LONGEST = 86_400.0
"""Seconds: the longest pause that a limiter takes."""

_MOST_LINKS = 10
"""Of a chain of errors; the bound of a chain that is a loop, too."""

_DELAY = re.compile(r"[0-9]+(\.[0-9]+)?")
"""Whole seconds, says the RFC; some servers send a fraction."""

Given = TypeVar("Given")
Found = TypeVar("Found")


def retry_after(error: BaseException) -> float | None:
    """The seconds for which a service wants no calls, where an error says so.

    That is an HTTP status error with status 429 or 503 and a ``Retry-After`` in either form of RFC 9110,
    section 10.2.3, or an error that wraps one: its cause or, unless suppressed, its context. Never
    raises, whatever the error holds.

    Args:
        error: What a tool raised.

    Returns:
        More than 0 and at most 86,400 seconds, which stands for all that is longer; or None.
    """
    link: BaseException | None = error
    for _ in range(_MOST_LINKS):
        if link is None:
            break
        seconds = _try(_asked, link)
        if seconds is not None:
            return seconds
        link = _try(_wrapped, link)
    return None


def _try(read: Callable[[Given], Found | None], given: Given) -> Found | None:
    """What is read, or None: texts come from anywhere, and an error's properties are code."""
    with suppress(Exception):
        return read(given)
    return None


def _wrapped(error: BaseException) -> BaseException | None:
    if error.__cause__ is not None:
        return error.__cause__
    return None if error.__suppress_context__ else error.__context__


def _asked(error: BaseException) -> float | None:
    """The seconds that this very error asks for."""
    response: Any = getattr(error, "response", None)
    if response.status_code not in (429, 503):
        return None
    headers = {
        name.lower(): value for name, value in response.headers.items() if isinstance(name, str)
    }
    asked = headers["retry-after"].strip()
    if _DELAY.fullmatch(asked):
        seconds = float(asked)  # "inf" for very many digits, where int() would raise.
    else:
        # By the service's own clock, where it tells it.
        date = _try(_timestamp, headers.get("date", ""))
        seconds = _timestamp(asked) - (time() if date is None else date)
    return min(seconds, _LONGEST) if seconds > 0 else None


def _timestamp(date: str) -> float:
    """Seconds since 1970. An HTTP date is in UTC, even in the form that does not say so."""
    read = parsedate_to_datetime(date)
    return (read if read.tzinfo else read.replace(tzinfo=timezone.utc)).timestamp()
