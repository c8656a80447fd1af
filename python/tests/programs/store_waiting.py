"""Four processes wait for one quota, in threads and in a loop each.

Says how many asked and were admitted, who was served after the bound, and in which windows too many were admitted.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from callgate import Limiter, ToolRateLimit

PROCESSES = 4
EACH = 6
RATE = 80
BURST = 4
BOUND = 20.0

Turn = tuple[float, float, bool]
"""When a call asked and when it was decided, and whether it was admitted."""


async def wait(limiter: Limiter) -> list[Turn]:
    """Waits in a loop and in threads at once."""

    def in_thread(_number: int) -> Turn:
        begin = time.monotonic()
        admitted = limiter.acquire_sync("search").admitted
        return begin, time.monotonic(), admitted

    async def in_loop() -> Turn:
        begin = time.monotonic()
        admitted = (await limiter.acquire("search")).admitted
        return begin, time.monotonic(), admitted

    with ThreadPoolExecutor(EACH) as pool:
        loop = asyncio.get_running_loop()
        threads = [loop.run_in_executor(pool, in_thread, number) for number in range(EACH)]
        return [*await asyncio.gather(*(in_loop() for _ in range(EACH)), *threads)]


def process(url: str) -> tuple[int, int]:
    """Starts a process that waits: its number, and where it says what became of that."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            limiter = Limiter({"search": ToolRateLimit(RATE, BURST, max_wait=BOUND)}, store=url)
            os.write(writing, json.dumps(asyncio.run(wait(limiter))).encode())
        finally:
            os._exit(0)
    os.close(writing)
    return child, reading


def main() -> None:
    """Runs it."""
    started = time.monotonic()
    turns: list[Turn] = []
    processes = [process(sys.argv[1]) for _ in range(PROCESSES)]
    for child, reading in processes:
        with os.fdopen(reading) as pipe:
            turns += json.loads(pipe.read())
        os.waitpid(child, 0)
    ends = sorted(end for _, end, admitted in turns if admitted)
    # A decision is seen some time after it was made, never before: so count from the start.
    over = [end for number, end in enumerate(ends, 1) if number > BURST + RATE * (end - started)]
    said = {
        "asked": len(turns),
        "admitted": len(ends),
        "late": [end - begin for begin, end, _ in turns if end - begin > BOUND],
        "over": over,
    }
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
