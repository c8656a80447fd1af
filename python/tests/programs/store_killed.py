"""Kills processes of a store at random moments, as often as is said, and starts others in their place.

Says how long the others took to go on, how often a tenant found what it should not, what was spent beside what was
noted, and which tenants found a full bucket in the end that had an empty one.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import sys
import time

from callgate import Limiter, ToolRateLimit

WORKERS = 4
URL = sys.argv[1]
ROUNDS = int(sys.argv[2])
PLENTY = 2**32 - 1
LIMITS = {
    "alone": ToolRateLimit.parse("1/h", PLENTY),
    "two": ToolRateLimit.parse("1/h", PLENTY),
    "both": ToolRateLimit.parse("1/h", PLENTY, tools="two"),
    "blocked": ToolRateLimit.parse("1/h", 1, per=["tenant"]),
    # New buckets all the time, whose cells are soon another's.
    "new": ToolRateLimit(1000, burst=100, per=["tenant"]),
}
BLOCKED = [f"blocked {number}" for number in range(50)]
ALONE, TWO, ASKED, ODD = range(4)

# Each worker writes its own numbers, and they outlive it.
noted = memoryview(mmap.mmap(-1, WORKERS * 4 * 8)).cast("Q")


def work(place: int, seed: int) -> None:
    """Asks until it is killed."""
    chosen = random.Random(seed)
    limiter = Limiter(LIMITS, store=URL)
    first = place * 4
    while True:
        noted[first + ALONE] += bool(limiter.try_acquire("alone"))
        noted[first + TWO] += bool(limiter.try_acquire("two"))
        noted[first + ODD] += not limiter.try_acquire("new", tenant=chosen.randrange(10**9))
        noted[first + ODD] += bool(limiter.try_acquire("blocked", tenant=chosen.choice(BLOCKED)))
        noted[first + ASKED] += 1


def start(place: int, seed: int) -> int:
    """Starts a worker."""
    process = os.fork()
    if process == 0:
        try:
            work(place, seed)
        finally:
            os._exit(1)
    return process


def go_on(places: list[int]) -> float:
    """Seconds until all of these workers have made another round."""
    begin = time.monotonic()
    before = {place: noted[place * 4 + ASKED] for place in places}
    while any(noted[place * 4 + ASKED] < count + 2 for place, count in before.items()):
        if time.monotonic() > begin + 20:
            return 20
        time.sleep(0.0005)
    return time.monotonic() - begin


def main() -> None:
    """Runs it."""
    chosen = random.Random(21)
    witness = Limiter(LIMITS, store=URL)
    for tenant in BLOCKED:
        assert witness.try_acquire("blocked", tenant=tenant)
    workers = [start(place, place) for place in range(WORKERS)]
    go_on([*range(WORKERS)])
    slowest = 0.0
    try:
        for turn in range(ROUNDS):
            time.sleep(chosen.random() / 50)
            place = chosen.randrange(WORKERS)
            os.kill(workers[place], signal.SIGKILL)
            os.waitpid(workers[place], 0)
            slowest = max(slowest, go_on([other for other in range(WORKERS) if other != place]))
            workers[place] = start(place, 100 + turn)
    finally:
        for process in workers:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    left = {name: level.remaining or 0 for name, level in witness.snapshot().items()}
    sums = [sum(noted[place * 4 + what] for place in range(WORKERS)) for what in range(4)]
    spent = {
        "alone": (sums[ALONE], PLENTY - left["alone"]),
        "two": (sums[TWO], PLENTY - left["two"]),
        "both": (sums[TWO], PLENTY - left["both"]),
    }
    full = [tenant for tenant in BLOCKED if witness.try_acquire("blocked", tenant=tenant)]
    said = {"slowest": slowest, "odd": sums[ODD], "spent": spent, "full": full}
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
