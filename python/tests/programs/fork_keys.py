"""Forks twenty times while threads ask for ever new tenants; each child must answer at once.

Says what each child answered, how long the slowest took, and whether the parent went on.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from itertools import count
from typing import Any

from callgate import Limiter, ToolRateLimit
from tests.running import forked

DEADLINE = 10.0
"""Seconds after which a child counts as hung; it answers within milliseconds."""

ONCE: dict[str, Any] = {"rate": "1/h", "burst": 1}
LIMITER = Limiter(
    {
        "lookup": ToolRateLimit.parse(**ONCE, per=["tenant"]),
        "users": ToolRateLimit.parse(**ONCE, per=["tenant", "user"], tools="lookup"),
        "all": ToolRateLimit(1e9, 2**32 - 1, tools="look*"),
    },
    default=ToolRateLimit.parse(**ONCE, per=["tenant"]),
)
TENANTS = count()


def answer(name: str) -> list[bool]:
    """What a process finds for a tenant that is new, and for one that all processes know."""
    found = [LIMITER.try_acquire("lookup", tenant=tenant) for tenant in (name, name, "known")]
    found.append(LIMITER.try_acquire(f"other {name}", tenant=name))
    return [decision.admitted for decision in found]


def in_child() -> dict[str, Any]:
    """What a child finds, before and after a reload of its own."""
    start = time.monotonic()
    found = answer("child")
    limits = {name: level.limit for name, level in LIMITER.snapshot().items() if name[0] != "["}
    LIMITER.reload({**limits, "more": ToolRateLimit(1, 1)})
    return {"found": found, "again": answer("child"), "seconds": time.monotonic() - start}


def main() -> None:
    """Runs it."""
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            LIMITER.try_acquire("lookup", tenant=next(TENANTS), user="me")

    for tenant in range(200_000):
        LIMITER.try_acquire("lookup", tenant=f"early {tenant}")
    LIMITER.try_acquire("lookup", tenant="known")
    busy = [threading.Thread(target=keep_busy) for _ in range(3)]
    for thread in busy:
        thread.start()
    children = [json.loads(forked(lambda: json.dumps(in_child()), DEADLINE)) for _ in range(20)]
    before = next(TENANTS)
    while next(TENANTS) < before + 100:
        time.sleep(0.001)
    stop.set()
    for thread in busy:
        thread.join()
    slowest = max(child.pop("seconds") for child in children)
    said = {"children": children, "slowest": slowest, "parent": answer("parent")}
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
