"""Ends while its store, which may not answer, is being asked in one way or another."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable

from callgate import Limiter, ToolRateLimit

URL, HOW = sys.argv[1:]
LIMITER = Limiter({"search": ToolRateLimit(1, 5, max_wait=60)}, store=URL)
ASKED = threading.Barrier(4)


async def tasks() -> None:
    """Leaves tasks that ask, which are cancelled."""
    asked = [asyncio.create_task(LIMITER.acquire("search")) for _ in range(3)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in asked)


async def forever() -> None:
    """Asks in a loop that is never stopped."""
    asked = [asyncio.create_task(LIMITER.acquire("search")) for _ in range(3)]
    await asyncio.sleep(0.01)
    ASKED.wait()
    await asyncio.gather(*asked)


def ask() -> None:
    """Asks in a thread."""
    ASKED.wait()
    LIMITER.try_acquire("search")


def keep_asking() -> None:
    """Asks in a thread, in all ways, again and again."""
    ASKED.wait()
    while True:
        LIMITER.try_acquire("search")
        LIMITER.snapshot()
        LIMITER.acquire_sync("search", max_wait=0.01)


def start(work: Callable[[], object]) -> None:
    """Starts daemon threads that ask."""
    for _ in range(3):
        threading.Thread(target=work, daemon=True).start()
    ASKED.wait()
    threading.Event().wait(0.05)


if HOW == "tasks":
    asyncio.run(tasks())
elif HOW == "threads":
    start(ask)
elif HOW == "loops":
    start(lambda: asyncio.run(forever()))
elif HOW == "busy":
    start(keep_asking)
elif HOW == "line":
    start(lambda: (ASKED.wait(), LIMITER.acquire_sync("search")))
else:
    start(ask)
    LIMITER.close()
sys.stdout.write("asked\n")
