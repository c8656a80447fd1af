"""A token bucket under an `asyncio.Lock`, as most people write it: what callgate is measured against."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping


class Bucket:
    """A token bucket of one tool."""

    def __init__(self, rate: float, burst: int) -> None:
        self.rate = rate
        self.burst = burst
        self.tokens = float(burst)
        self.updated = time.monotonic()


class LockBuckets:
    """A bucket for each tool, and one lock around them."""

    def __init__(self, limits: Mapping[str, tuple[float, int]]) -> None:
        self._buckets = {name: Bucket(rate, burst) for name, (rate, burst) in limits.items()}
        self._lock = asyncio.Lock()

    async def acquire(self, name: str) -> float:
        """Spends a token and answers 0, or answers with the seconds until there is one."""
        bucket = self._buckets.get(name)
        if bucket is None:
            return 0.0
        async with self._lock:
            now = time.monotonic()
            elapsed = now - bucket.updated
            bucket.tokens = min(bucket.burst, bucket.tokens + elapsed * bucket.rate)
            bucket.updated = now
            if bucket.tokens >= 1:
                bucket.tokens -= 1
                return 0.0
            return (1 - bucket.tokens) / bucket.rate
