"""Starts a pool of processes in the way that is named; each makes the limiter of its store for itself.

Says what all of them were admitted, tool by tool, and what is left.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections import Counter

from callgate import Limiter, ToolRateLimit

URL = sys.argv[1]
LIMITER = Limiter(
    {
        "search": ToolRateLimit.parse("1/h", 50),
        "tenants": ToolRateLimit.parse("1/h", 7, tools="crm_*", per=["tenant"]),
        "many": ToolRateLimit.parse("1/h", 40),
        "more": ToolRateLimit.parse("1/h", 90, tools="man?"),
    },
    default=ToolRateLimit.parse("1/h", 11),
    store=URL,
)


def ask(number: int) -> tuple[int, Counter[str]]:
    """Asks for a little of everything: this process, and what it was admitted."""
    tenant = f"tenant {number % 3}"
    found = Counter(
        search=sum(LIMITER.try_acquire("search").admitted for _ in range(3)),
        tenants=sum(LIMITER.try_acquire("crm_find", tenant=tenant).admitted for _ in range(3)),
        many=sum(LIMITER.try_acquire("many").admitted for _ in range(3)),
        other=LIMITER.try_acquire("other").admitted,
    )
    return os.getpid(), found


def main() -> None:
    """Runs it."""
    context = multiprocessing.get_context(sys.argv[2])
    _, admitted = ask(0)
    with context.Pool(4, maxtasksperchild=3) as pool:
        told = pool.map(ask, range(40), chunksize=1)
    for _, found in told:
        admitted += found
    remaining = {name: LIMITER.snapshot()[name].remaining for name in ("search", "many")}
    processes = len({process for process, _ in told})
    json.dump({"admitted": admitted, "processes": processes, "remaining": remaining}, sys.stdout)


if __name__ == "__main__":
    main()
