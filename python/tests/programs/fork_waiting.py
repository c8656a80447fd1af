"""Forks while calls wait in threads and in a loop, and others run; each child must answer at once.

Says what each child found, how long the slowest took, and whether all of the parent's came to their end.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from typing import Any

from callgate import Limiter, ToolRateLimit
from tests.running import forked

DEADLINE = 10.0
"""Seconds after which a child counts as hung; it answers within milliseconds."""

LIMITER = Limiter({
    "run": ToolRateLimit(1e6, 1000, max_concurrent=2, max_wait=60),
    "search": ToolRateLimit(0.001, 2, max_wait=3600),
    "busy": ToolRateLimit(2000, 1, max_wait=60),
})


def in_child() -> dict[str, Any]:
    """What a child finds: two permits, whatever runs in its parent, and the tokens that were left."""
    start = time.monotonic()
    with LIMITER.try_acquire("run") as first, LIMITER.acquire_sync("run") as second:
        full = LIMITER.try_acquire("run")
        waited = LIMITER.acquire_sync("run", max_wait=0.02)
    with asyncio.run(LIMITER.acquire("run")) as third:
        pass
    found = [bool(first), bool(second), full.reason, waited.reason, bool(third)]
    busy = [LIMITER.acquire_sync("busy"), asyncio.run(LIMITER.acquire("busy"))]
    # Nobody is before it any more: it would wait for one token alone.
    retry = LIMITER.try_acquire("search").retry_after or 0
    return {
        "found": [*found, *map(bool, busy), 900 < retry <= 1000],
        "seconds": time.monotonic() - start,
    }


def main() -> None:
    """Runs it."""
    assert LIMITER.try_acquire("search", cost=2)
    stop = threading.Event()
    ended: list[bool] = []

    def run_one() -> None:
        with LIMITER.acquire_sync("run") as decision:
            ended.append(decision.admitted)

    def keep_busy() -> None:
        while not stop.is_set():
            LIMITER.acquire_sync("busy")

    async def loop() -> None:
        search = asyncio.create_task(LIMITER.acquire("search"))
        while not stop.is_set():
            await LIMITER.acquire("busy")
        search.cancel()
        with await LIMITER.acquire("run") as decision:
            ended.append(decision.admitted)

    works = [run_one, run_one, keep_busy, lambda: asyncio.run(loop())]
    threads = [threading.Thread(target=work) for work in works]
    with LIMITER.try_acquire("run"), LIMITER.try_acquire("run"):
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        children = [json.loads(forked(lambda: json.dumps(in_child()), DEADLINE)) for _ in range(20)]
        stop.set()
    for thread in threads:
        thread.join()
    slowest = max(child.pop("seconds") for child in children)
    found = [child["found"] for child in children]
    json.dump({"children": found, "slowest": slowest, "parent": ended}, sys.stdout)


if __name__ == "__main__":
    main()
