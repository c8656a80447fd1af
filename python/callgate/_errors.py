"""The errors, and how a rejection reads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from callgate._callgate import Decision

OnStoreError: TypeAlias = Literal["local", "deny", "admit", "raise"]
"""What becomes of a call while a Redis store fails: see `Limiter`."""


class CallgateError(Exception):
    """The base of every error that callgate raises."""

    __module__ = "callgate"


class ConfigError(CallgateError, ValueError):
    """A value was refused when it was given.

    The message names the value, what it was and what is allowed.

    Example:
        >>> from callgate import ToolRateLimit
        >>> ToolRateLimit(requests_per_second=2, burst=0)
        Traceback (most recent call last):
            ...
        callgate.ConfigError: burst must be a whole number from 1 to 4,294,967,295, got 0
    """

    __module__ = "callgate"


class StoreError(CallgateError):
    """A Redis store could not be asked about a call, and a limit says to raise an error then.

    The message says why, without user and password. Or its limiter is closed. The memory store can always be asked.
    """

    __module__ = "callgate"


class RateLimitExceeded(CallgateError):
    """A call was rejected, where a rejection is asked for as an error.

    Attributes:
        decision: The decision that rejected it.

    Example:
        >>> from callgate import Limiter, RateLimitExceeded, ToolRateLimit
        >>> limiter = Limiter({"search": ToolRateLimit(1, burst=1)}, clock=lambda: 0.0)
        >>> _ = limiter.try_acquire("search")
        >>> str(RateLimitExceeded(limiter.try_acquire("search")))
        "Rate limit exceeded for tool 'search'. Retry in 1 second."
    """

    __module__ = "callgate"

    def __init__(self, decision: Decision) -> None:
        """Words the rejection.

        Args:
            decision: The decision that rejected the call.
        """
        super().__init__(decision)
        self.decision = decision

    def __str__(self) -> str:
        return describe(self.decision)


def describe(decision: Decision) -> str:
    """Says to a model that a call was rejected, and when to try again."""
    if decision.reason == "store":
        # Nobody knows whether a limit is exceeded, nor for how long that will be so.
        return f"The rate limit of tool '{decision.tool}' cannot be checked at the moment. Retry later."
    said = f"Rate limit exceeded for tool '{decision.tool}'."
    if decision.reason == "concurrency":
        # The limit may count the calls of other tools too.
        return f"{said} Too many calls run at the same time: retry when one of them has ended."
    if decision.retry_after is None:
        return f"{said} The call costs more than the limit can ever admit: do not retry it."
    return f"{said} Retry in {_seconds(decision.retry_after)}."


def _seconds(seconds: float) -> str:
    """Rounds up to whole milliseconds, and from ten seconds on to whole seconds."""
    places = 3 if seconds < 10 else 0
    # A tenth of a nanosecond less, so that 0.1 + 0.2 is not rounded up to 0.301.
    rounded = math.ceil((seconds - 1e-10) * 10**places) / 10**places
    return (
        "1 second"
        if rounded == 1
        else f"{rounded:g} seconds"
        if places
        else f"{rounded:.0f} seconds"
    )
