"""Forks while a thread keeps limiters of a store busy: before they were used first, and after.

Each child asks for known and new tenants, alone and under two limits, waits for a turn, and forks a child of its
own. Says what was odd, how long the slowest took, and how much all of them were admitted.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from functools import partial
from itertools import count
from typing import Any

from callgate import Limiter, ToolRateLimit
from tests.running import forked

DEADLINE = 10.0
"""Seconds after which a child counts as hung; it answers within milliseconds."""

BURST = 150
LIMITS = {
    "search": ToolRateLimit.parse("1/h", BURST),
    "all": ToolRateLimit(1e9, 2**32 - 1, tools="sea*"),
    "tenants": ToolRateLimit.parse("1/h", 1, per=["tenant"]),
    "fast": ToolRateLimit(2000, burst=1, max_wait=60),
    "busy": ToolRateLimit(1e9, 1000, tools="tenants", per=["tenant", "user"]),
}
TENANTS = count()


def answer(limiter: Limiter, name: str) -> dict[str, Any]:
    """What a process finds, and what is odd about it."""
    odd = []
    begin = time.monotonic()
    taken = sum(limiter.try_acquire("search").admitted for _ in range(2))
    new = [limiter.try_acquire("tenants", tenant=name).admitted for _ in range(2)]
    if new != [True, False]:
        odd.append(f"{name}: a new tenant found {new}")
    if limiter.try_acquire("tenants", tenant="known").reason != "rate":
        odd.append(f"{name}: a tenant was given another token")
    waited = [limiter.acquire_sync("fast"), asyncio.run(limiter.acquire("fast"))]
    if not all(waited):
        odd.append(f"{name}: waiting found {waited}")
    return {"taken": taken, "odd": odd, "seconds": time.monotonic() - begin}


def family(limiter: Limiter, name: str) -> str:
    """What a child and a child of that child find."""
    mine = answer(limiter, name)
    theirs = forked(lambda: json.dumps(answer(limiter, f"{name}, and its child")), DEADLINE)
    return json.dumps([mine, json.loads(theirs)])


def main() -> None:
    """Runs it."""
    url = sys.argv[1]
    known = Limiter(LIMITS, store=url)
    known.try_acquire("tenants", tenant="known")
    stop = threading.Event()
    found: list[dict[str, Any]] = []
    limiter = known

    def keep_busy() -> None:
        while not stop.is_set():
            limiter.try_acquire("tenants", tenant=next(TENANTS) % 500, user="me")
            limiter.snapshot()

    busy = threading.Thread(target=keep_busy)
    for number in range(20):
        if number % 2 == 0:
            limiter = Limiter(LIMITS, store=url)  # Which nobody but the thread has used.
        if number == 0:
            busy.start()
        child = partial(family, limiter, f"child {number}")
        found += json.loads(forked(child, DEADLINE))
    before = next(TENANTS)
    while next(TENANTS) < before + 100:
        time.sleep(0.001)
    stop.set()
    busy.join()
    taken = sum(child["taken"] for child in found)
    while known.try_acquire("search"):
        taken += 1
    said = {
        "children": len(found),
        "odd": [odd for child in found for odd in child["odd"]],
        "slowest": max(child["seconds"] for child in found),
        "admitted": taken,
        "burst": BURST,
        "parent": known.try_acquire("tenants", tenant="parent").admitted,
    }
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
