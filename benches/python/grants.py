"""Many tasks of one loop wait for a token of the same bucket: what a grant costs, and who gets it.

The rate is the same however many wait, so that nothing else differs. The bucket is drained first, and
its burst is a tenth of a second's tokens: a loop that is busy for a moment loses none.

Each measurement is a process of its own, since some limiters leave threads behind: python grants.py
LIMITER WAITERS prints what happened as JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path

import pyrate_limiter
from aiolimiter import AsyncLimiter
from asynciolimiter import LeakyBucketLimiter
from peers import TOOL, Acquire, Peer
from timing import median

from callgate import Limiter, ToolRateLimit

RATE = 5_000
BURST = 500
WAITERS = (100, 1_000, 10_000)

RUNS = {100: 20, 1_000: 3, 10_000: 1}
"""In one process, after one that does not count."""
GRACE = 10.0
"""Who is not served so long after the last token was due is given up."""


@dataclass(frozen=True)
class Wait:
    """What happened: in one run, and in all runs of a process together."""

    cpu: float
    """Nanoseconds of the process, from before the tasks are made, for each of them."""
    served: bool
    """Whether all were. If not, the CPU time is that until they were given up."""
    in_order: bool
    """Whether they were served in order of arrival."""
    early: float
    """The most that a grant came before its token was due, in seconds."""
    late: float
    """The most that it came after that."""


def wait_apart(peer: Peer, waiters: int) -> Wait:
    """Waits in another process, which may not come back."""
    command = [sys.executable, str(Path(__file__).resolve()), peer.name, str(waiters)]
    # Longer than the runs take if each gives up; then the loop itself hangs.
    timeout = (RUNS[waiters] + 1) * (waiters / RATE + GRACE + 10.0)
    try:
        run = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return Wait(cpu=math.inf, served=False, in_order=False, early=0.0, late=math.inf)
    return Wait(**json.loads(run.stdout))


def wait_here(peer: Peer, waiters: int) -> Wait:
    """Waits here, each time in a new loop and with a new limiter."""
    asyncio.run(wait(peer, min(WAITERS)))
    runs = [asyncio.run(wait(peer, waiters)) for _ in range(RUNS[waiters])]
    return Wait(
        cpu=median([run.cpu for run in runs]),
        served=all(run.served for run in runs),
        in_order=all(run.in_order for run in runs),
        early=max(run.early for run in runs),
        late=max(run.late for run in runs),
    )


async def wait(peer: Peer, waiters: int) -> Wait:
    """Drains a bucket, and lets all ask at once for one token more."""
    gc.collect()
    begin = time.monotonic()
    acquire = peer.make(RATE, BURST)
    for _ in range(BURST):
        await acquire()
    grants: list[tuple[int, float]] = []

    async def waiter(number: int) -> None:
        if peer.admitted(await acquire()):
            grants.append((number, time.monotonic()))

    gc.disable()
    start = time.process_time_ns()
    tasks = [asyncio.create_task(waiter(number)) for number in range(waiters)]
    await asyncio.wait(tasks, timeout=waiters / RATE + GRACE)
    cpu = (time.process_time_ns() - start) / waiters
    gc.enable()

    arrivals = [number for number, _ in grants]
    lateness = [at - begin - nth / RATE for nth, (_, at) in enumerate(grants, start=1)]
    return Wait(
        cpu=cpu,
        served=len(grants) == waiters,
        in_order=arrivals == sorted(arrivals),
        early=max([0.0, *(-by for by in lateness)]),
        late=max([0.0, *lateness]),
    )


def _no_wait(_rate: int, _burst: int) -> Acquire:
    return partial(asyncio.sleep, 0)


def _timer(rate: int, burst: int) -> Acquire:
    loop = asyncio.get_running_loop()
    begin = loop.time()
    nth = count(1 - burst)

    async def acquire() -> None:
        due = loop.create_future()
        loop.call_at(begin + next(nth) / rate, due.set_result, None)
        await due

    return acquire


def _callgate(rate: int, burst: int) -> Acquire:
    limiter = Limiter({TOOL: ToolRateLimit(rate, burst=burst, max_wait=60)})
    return partial(limiter.acquire, TOOL)


def _aiolimiter(rate: int, burst: int) -> Acquire:
    return AsyncLimiter(burst, burst / rate).acquire


def _asynciolimiter(rate: int, burst: int) -> Acquire:
    return LeakyBucketLimiter(rate, capacity=burst).wait


def _pyrate(rate: int, burst: int) -> Acquire:
    rates = [pyrate_limiter.Rate(rate, pyrate_limiter.Duration.SECOND, burst=burst)]
    bucket = pyrate_limiter.StateBucket(rates, algorithm=pyrate_limiter.TokenBucket())
    limiter = pyrate_limiter.Limiter(pyrate_limiter.BucketAsyncWrapper(bucket))
    return partial(limiter.try_acquire_async, TOOL)


NO_WAIT = Peer(
    "`asyncio.sleep(0)`", "what a task costs that waits for nothing", _no_wait, lambda _: True
)

LIMITERS = (
    Peer(
        "callgate",
        "`await limiter.acquire(name)` under a limit with `max_wait`",
        _callgate,
        lambda decision: bool(decision.admitted),
        package="callgate",
    ),
    Peer(
        "aiolimiter",
        "`AsyncLimiter.acquire`; it may wake several for one token, and who comes too late for it "
        "queues again, behind all",
        _aiolimiter,
        lambda _: True,
        package="aiolimiter",
    ),
    Peer(
        "asynciolimiter",
        "`LeakyBucketLimiter.wait`, of its three limiters the one that is a bucket with a burst",
        _asynciolimiter,
        lambda _: True,
        package="asynciolimiter",
    ),
    Peer(
        "pyrate-limiter",
        "`StateBucket(…, algorithm=TokenBucket())` in a `BucketAsyncWrapper`, `try_acquire_async`; "
        "it sleeps 50 ms more than it must (`buffer_ms`), then serves all that was due by then; "
        "its clock counts whole milliseconds",
        _pyrate,
        bool,
        package="pyrate-limiter",
    ),
    Peer(
        "a timer for each",
        "no limiter: `loop.call_at` for a future a task, due when its token is",
        _timer,
        lambda _: True,
    ),
)


if __name__ == "__main__":
    _, name, number = sys.argv
    limiter = next(peer for peer in (NO_WAIT, *LIMITERS) if peer.name == name)
    print(json.dumps(asdict(wait_here(limiter, int(number)))))
    sys.stdout.flush()
    # Threads that are left behind would keep the interpreter from ending.
    os._exit(0)
