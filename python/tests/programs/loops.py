"""One limiter in several event loops, one after another and at once, with every warning an error.

Says how many were admitted, and whether that was within the bound, for the kind of loop that is named.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import time
from asyncio import AbstractEventLoop
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import anyio.lowlevel
import uvloop

from callgate import Decision, Limiter, ToolRateLimit

RATE, BURST = 1000, 5
MADE = time.monotonic()
LIMITER = Limiter({"search": ToolRateLimit(RATE, BURST, max_wait=10)})
SEVERAL = 50

Main = Callable[[], Coroutine[Any, Any, int]]


def run(kind: str, main: Main) -> int:
    """Runs a coroutine in a loop of its own, of this kind."""

    async def patient() -> int:
        # A busy machine is no fault.
        asyncio.get_running_loop().slow_callback_duration = 60
        return await main()

    if kind == "asyncio":
        return asyncio.run(patient(), debug=True)
    return anyio.run(patient, backend_options={"debug": True, "use_uvloop": kind == "uvloop"})


def factory(kind: str) -> Callable[[], AbstractEventLoop]:
    """What makes such a loop."""
    return uvloop.new_event_loop if kind == "uvloop" else asyncio.new_event_loop


async def one() -> Decision:
    """A call that waits."""
    return await LIMITER.acquire("search")


async def all_at_once() -> int:
    """Fifty calls, all to be served."""
    return sum(map(bool, await asyncio.gather(*(one() for _ in range(SEVERAL)))))


async def abandoned() -> int:
    """Fifty calls, of which only the first ten are waited for."""
    tasks = [asyncio.create_task(one()) for _ in range(SEVERAL)]
    return sum(map(bool, await asyncio.gather(*tasks[:10])))


def stopped(kind: str) -> int:
    """The same in a loop that is stopped and closed, where nobody cancels them."""
    loop = factory(kind)()
    # What asyncio says of each task that is dropped while it waits, for whatever it waits.
    loop.set_exception_handler(lambda _loop, _context: None)
    admitted = loop.run_until_complete(abandoned())
    loop.close()
    gc.collect()
    return admitted


async def grouped() -> int:
    """Fifty calls in a group of anyio's, and others in one that is cancelled."""
    admitted = 0

    async def count() -> None:
        nonlocal admitted
        decision = await one()
        admitted += decision.admitted

    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(LIMITER.acquire, "search")
        await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    with anyio.move_on_after(0):
        await one()
    async with anyio.create_task_group() as group:
        for _ in range(SEVERAL):
            group.start_soon(count)
    return admitted


def in_threads(kind: str, main: Main) -> list[int]:
    """Two loops in two threads at once."""
    admitted: list[int] = []
    threads = [threading.Thread(target=lambda: admitted.append(run(kind, main))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return admitted


def main() -> None:
    """Runs it."""
    kind = sys.argv[1]
    said: dict[str, Any] = {
        "abandoned": [run(kind, abandoned), stopped(kind)],
        "after": [run(kind, all_at_once) for _ in range(2)],
        "threads": in_threads(kind, all_at_once),
        "group": run(kind, grouped),
    }
    admitted = sum(sum(part) if isinstance(part, list) else part for part in said.values())
    said["in_bound"] = admitted <= BURST + RATE * (time.monotonic() - MADE)
    said["left"] = LIMITER.acquire_sync("search", cost=BURST).admitted
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
