"""Starts processes in the way that is named, which call a decorated function of this module."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys

from callgate import Limiter, RateLimitExceeded, ToolRateLimit

LIMITER = Limiter({"search": ToolRateLimit(2000, 1, max_wait=60), "once": ToolRateLimit(0.001, 1)})


@LIMITER.limit("search")
def search(number: int) -> int:
    """Waits for its turn."""
    return number + 1


@LIMITER.limit("search")
async def search_async(number: int) -> int:
    """Waits for its turn in a loop."""
    return number + 2


@LIMITER.limit("once")
def once() -> None:
    """Is rejected the second time."""


def work(number: int) -> list[int]:
    """Calls them."""
    return [search(number), search(number), asyncio.run(search_async(number))]


def main() -> None:
    """Runs it."""
    context = multiprocessing.get_context(sys.argv[1])
    with context.Pool(2) as pool:
        found = [pool.apply_async(work, (number,)).get(30) for number in range(4)]
        again = [pool.apply_async(search, (number,)).get(30) for number in range(4)]
        reason = None
        try:
            for _ in range(3):
                pool.apply_async(once).get(30)
        except RateLimitExceeded as error:
            reason = error.decision.reason
    json.dump({"found": found, "again": again, "reason": reason}, sys.stdout)


if __name__ == "__main__":
    main()
