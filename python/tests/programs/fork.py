"""Forks twenty times while a thread keeps the limiter busy; each child must answer at once.

Says what each child answered, and whether the parent went on.
"""

from __future__ import annotations

import json
import sys
import threading
import time

from callgate import Limiter, ToolRateLimit
from callgate._callgate import decision_counts
from tests.running import forked

DEADLINE = 10.0
"""Seconds after which a child counts as hung; it answers within milliseconds."""


def frozen() -> float:
    """A clock that stands still, and lets other threads run while it is read."""
    time.sleep(0)
    return 1000.0


LIMITER = Limiter({"busy": ToolRateLimit(1000, 10), "search": ToolRateLimit(1, 3)}, clock=frozen)
REAL = Limiter({"busy": ToolRateLimit(1e9, 1), "search": ToolRateLimit.parse("1/h", 3)})


def answer() -> list[list[bool]]:
    """What a process finds: what is left in its buckets, and then nothing more."""
    return [
        [limiter.try_acquire("search").admitted for _ in range(4)] for limiter in (LIMITER, REAL)
    ]


def in_child() -> dict[str, object]:
    """What a child finds, and what it counts: its own decisions alone."""
    before = decision_counts()
    found = answer()
    counts = [[outcome, count] for tool, _, outcome, count in decision_counts() if tool == "search"]
    return {"before": before, "found": found, "counts": counts}


def main() -> None:
    """Runs it."""
    stop = threading.Event()
    asked = 0

    def keep_busy() -> None:
        nonlocal asked
        while not stop.is_set():
            for limiter in (LIMITER, REAL):
                limiter.try_acquire("busy")
                limiter.snapshot()
            asked += 1

    busy = threading.Thread(target=keep_busy)
    busy.start()
    for limiter in (LIMITER, REAL):
        limiter.try_acquire("search")
    children = [forked(lambda: json.dumps(in_child()), DEADLINE) for _ in range(20)]
    before = asked
    while asked == before:
        time.sleep(0.001)
    stop.set()
    busy.join()
    json.dump({"children": [json.loads(said) for said in children], "parent": answer()}, sys.stdout)


if __name__ == "__main__":
    main()
