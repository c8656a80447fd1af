"""Asks about very many tools, and says how the process's counts then stand."""

from __future__ import annotations

import json
import sys

from callgate import Limiter, ToolRateLimit
from callgate._callgate import decision_counts

ONCE = ToolRateLimit.parse("1/h", 1)
LONG = "x" * 300


def counts_of(tool: str) -> dict[str, int]:
    """How often each outcome was counted for a tool."""
    return {outcome: count for name, _, outcome, count in decision_counts() if name == tool}


def main() -> None:
    """Runs it."""
    limiter = Limiter({}, default=ONCE)
    limiter.try_acquire(LONG)
    for number in range(2500):
        limiter.try_acquire(f"tool {number}")
    limiter.try_acquire("tool 2499")
    tools = len({tool for tool, *_ in decision_counts()})
    # What a limit names was not made up by whoever calls.
    Limiter({"named": ONCE}).try_acquire("named")
    others, named = counts_of("_OTHER"), counts_of("named")
    json.dump({"tools": tools, "others": others, "named": named}, sys.stdout)


if __name__ == "__main__":
    main()
