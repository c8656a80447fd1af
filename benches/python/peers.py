"""The limiters that callgate is compared with, each in memory and used as its documentation says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, TypeAlias

import limits
import limits.aio.storage
import limits.aio.strategies
import limits.storage
import limits.strategies
import pyrate_limiter
import throttled
import throttled.asyncio
from aiolimiter import AsyncLimiter
from asyncio_lock import LockBuckets

from callgate import Limiter, ToolRateLimit

TOOL = "lookup_customer"

Acquire: TypeAlias = Callable[[], Any]
"""Asks for one token of a limiter; for an async limiter, what it returns is to be awaited."""


@dataclass(frozen=True)
class Peer:
    """A limiter and how it is used."""

    name: str
    how: str
    make: Callable[[int, int], Acquire]
    """Makes a limiter of a rate (a second) and a burst. Called in a running event loop."""
    admitted: Callable[[Any], bool]
    """Whether an answer admits the call."""
    package: str | None = None
    awaits: bool = False
    windows: bool = False
    """Promises at most `rate` in each window of a second, instead of a token bucket."""

    @property
    def title(self) -> str:
        """The name, with the version where there is one."""
        return f"{self.name} {version(self.package)}" if self.package else self.name

    def most(self, rate: int, burst: int, elapsed: float) -> int:
        """The most that the limiter may admit in so many seconds by its own rules."""
        if self.windows:
            return rate * (math.floor(elapsed) + 1)
        return math.floor(burst + rate * elapsed)


def _callgate(rate: int, burst: int) -> Acquire:
    limiter = Limiter({TOOL: ToolRateLimit(rate, burst=burst)})
    return partial(limiter.try_acquire, TOOL)


def _asyncio_lock(rate: int, burst: int) -> Acquire:
    return partial(LockBuckets({TOOL: (rate, burst)}).acquire, TOOL)


def _aiolimiter(rate: int, burst: int) -> Acquire:
    return AsyncLimiter(burst, burst / rate).acquire


def _limits(rate: int, _burst: int) -> Acquire:
    limiter = limits.strategies.FixedWindowRateLimiter(limits.storage.MemoryStorage())
    return partial(limiter.hit, limits.RateLimitItemPerSecond(rate), TOOL)


def _limits_async(rate: int, _burst: int) -> Acquire:
    limiter = limits.aio.strategies.FixedWindowRateLimiter(limits.aio.storage.MemoryStorage())
    return partial(limiter.hit, limits.RateLimitItemPerSecond(rate), TOOL)


def _pyrate_bucket(rate: int, burst: int) -> pyrate_limiter.StateBucket:
    rates = [pyrate_limiter.Rate(rate, pyrate_limiter.Duration.SECOND, burst=burst)]
    return pyrate_limiter.StateBucket(rates, algorithm=pyrate_limiter.TokenBucket())


def _pyrate(rate: int, burst: int) -> Acquire:
    limiter = pyrate_limiter.Limiter(_pyrate_bucket(rate, burst))
    return partial(limiter.try_acquire, TOOL, blocking=False)


def _pyrate_async(rate: int, burst: int) -> Acquire:
    bucket = pyrate_limiter.BucketAsyncWrapper(_pyrate_bucket(rate, burst))
    return partial(pyrate_limiter.Limiter(bucket).try_acquire_async, TOOL, blocking=False)


def _throttled(rate: int, burst: int) -> Acquire:
    store = throttled.MemoryStore()
    limiter = throttled.Throttled(quota=f"{rate}/s burst {burst}", store=store)
    return partial(limiter.limit, TOOL)


def _throttled_async(rate: int, burst: int) -> Acquire:
    store = throttled.asyncio.MemoryStore()
    limiter = throttled.asyncio.Throttled(quota=f"{rate}/s burst {burst}", store=store)
    return partial(limiter.limit, TOOL)


def _not_limited(result: throttled.RateLimitResult) -> bool:
    return not result.limited


PEERS = (
    Peer(
        "callgate",
        "`Limiter.try_acquire`",
        _callgate,
        lambda decision: bool(decision.admitted),
        package="callgate",
    ),
    Peer(
        "`asyncio.Lock` bucket",
        "`asyncio_lock.py` beside this script",
        _asyncio_lock,
        lambda wait: bool(wait == 0),
        awaits=True,
    ),
    Peer(
        "aiolimiter",
        "`AsyncLimiter.acquire`, which waits for its turn; its documentation says one limiter a loop",
        _aiolimiter,
        lambda _: True,
        package="aiolimiter",
        awaits=True,
    ),
    Peer(
        "limits",
        "`FixedWindowRateLimiter.hit`, its cheapest strategy (it has no token bucket)",
        _limits,
        bool,
        package="limits",
        windows=True,
    ),
    Peer(
        "limits, async",
        "the same in `limits.aio`",
        _limits_async,
        bool,
        package="limits",
        awaits=True,
        windows=True,
    ),
    Peer(
        "pyrate-limiter",
        "`StateBucket(…, algorithm=TokenBucket())`, `try_acquire(blocking=False)`; its clock counts "
        "whole milliseconds, so it may be a token early",
        _pyrate,
        bool,
        package="pyrate-limiter",
    ),
    Peer(
        "pyrate-limiter, async",
        "the same bucket in a `BucketAsyncWrapper`, `try_acquire_async(blocking=False)`",
        _pyrate_async,
        bool,
        package="pyrate-limiter",
        awaits=True,
    ),
    Peer(
        "throttled-py",
        "`Throttled.limit`, its default algorithm (token bucket, refilled on whole seconds)",
        _throttled,
        _not_limited,
        package="throttled-py",
    ),
    Peer(
        "throttled-py, async",
        "the same in `throttled.asyncio`",
        _throttled_async,
        _not_limited,
        package="throttled-py",
        awaits=True,
    ),
)
