"""Four threads with an event loop each, eight tasks in a loop, all at one limiter for a second.

Each run is a process of its own, since some do not come back: python hammer.py PEER prints what
happened as a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

from peers import PEERS, Acquire, Peer

THREADS = 4
TASKS = 8
IN_A_ROW = 16
"""Calls of a task before it lets the others of its loop run."""
SECONDS = 1.0
RATE = 1_000
BURST = 100

GRACE = 2.0
"""A loop that is not done so long after its time counts as hung."""


@dataclass
class Tally:
    """What happened: in one thread, and in all of them together."""

    calls: int = 0
    admitted: int = 0
    errors: int = 0
    error: str = ""
    hung: int = 0
    """Loops, of `THREADS`."""
    begin: float = 0.0
    end: float = 0.0
    """When the last call came back."""


def hammer_apart(peer: Peer) -> Tally:
    """Hammers a limiter in another process; one that dies or cannot even be counted is all hung."""
    command = [sys.executable, str(Path(__file__).resolve()), peer.name]
    try:
        run = subprocess.run(
            command, capture_output=True, check=True, timeout=SECONDS + GRACE + 20.0
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return Tally(error=str(error), hung=THREADS)
    return Tally(**json.loads(run.stdout))


def hammer(peer: Peer) -> Tally:
    """Hammers a limiter here. Threads that hang are left behind."""
    made: Future[Acquire] = Future()
    together = threading.Barrier(THREADS)
    tallies = [Tally() for _ in range(THREADS)]

    async def loop(tally: Tally) -> None:
        if tally is tallies[0]:
            made.set_result(peer.make(RATE, BURST))
        acquire = made.result()
        together.wait()
        tally.begin = time.monotonic()
        await asyncio.gather(*(call_on(peer, acquire, tally) for _ in range(TASKS)))

    def thread(tally: Tally) -> None:
        asyncio.run(loop(tally))

    threads = [threading.Thread(target=thread, args=(tally,), daemon=True) for tally in tallies]
    for each in threads:
        each.start()
    deadline = time.monotonic() + SECONDS + GRACE
    for each in threads:
        each.join(max(0.0, deadline - time.monotonic()))
    return total(tallies, hung=sum(each.is_alive() for each in threads))


async def call_on(peer: Peer, acquire: Acquire, tally: Tally) -> None:
    """Calls until the time is over."""
    while time.monotonic() < tally.begin + SECONDS:
        tally.calls += 1
        try:
            answer = acquire()
            if peer.awaits:
                answer = await answer
        except Exception as error:  # noqa: BLE001 - whatever it raises is counted
            tally.errors += 1
            tally.error = f"{type(error).__name__}: {re.sub('<.*>', '…', str(error))}"
        else:
            tally.admitted += peer.admitted(answer)
        tally.end = time.monotonic()
        if tally.calls % IN_A_ROW == 0:
            await asyncio.sleep(0)


def total(tallies: list[Tally], hung: int) -> Tally:
    """All threads together."""
    return Tally(
        calls=sum(tally.calls for tally in tallies),
        admitted=sum(tally.admitted for tally in tallies),
        errors=sum(tally.errors for tally in tallies),
        error=next((tally.error for tally in tallies if tally.error), ""),
        hung=hung,
        begin=min(tally.begin for tally in tallies),
        end=max(tally.end for tally in tallies),
    )


if __name__ == "__main__":
    print(json.dumps(asdict(hammer(next(peer for peer in PEERS if peer.name == sys.argv[1])))))
    sys.stdout.flush()
    # Threads that hang would keep the interpreter from ending.
    os._exit(0)
