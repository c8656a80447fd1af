"""Starts processes in the way that is named; each makes the limiter of this module for itself."""

from __future__ import annotations

import json
import multiprocessing
import sys

from callgate import Decision, Limiter, ToolRateLimit

LIMITER = Limiter({"search": ToolRateLimit.parse("1/h", 3)})


def ask(times: int) -> list[Decision]:
    """Decisions travel back between the processes."""
    return [LIMITER.try_acquire("search") for _ in range(times)]


def main() -> None:
    """Runs it."""
    context = multiprocessing.get_context(sys.argv[1])
    ask(1)
    with context.Pool(2, maxtasksperchild=1) as pool:
        told = [pool.apply_async(ask, (4,)).get(30) for _ in range(3)]
    said = [[decision.admitted for decision in decisions] for decisions in told]
    json.dump({"children": said, "parent": [bool(decision) for decision in ask(3)]}, sys.stdout)


if __name__ == "__main__":
    main()
