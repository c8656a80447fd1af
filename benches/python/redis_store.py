"""A quota in Redis: what tasks of one event loop get decided, beside other clients of the same server."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias, cast

import limits
import throttled.asyncio
from redis.asyncio import Redis
from timing import Samples

from callgate import Limiter, ToolRateLimit

CALLERS = (1, 16, 256)
CALLS = {1: 1_000, 16: 4_000, 256: 10_240}
"""In each round, of all callers together."""
ROUNDS = 7

# Never empty while this runs.
RATE = 1_000_000
CONNECTIONS = max(CALLERS)
"""That redis-py may have: it opens one for each call on its way."""
SCRIPT = (
    Path(__file__).parents[2] / "crates" / "callgate" / "src" / "store" / "redis" / "script.lua"
)

Acquire: TypeAlias = Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class Asker:
    """Somebody who asks the server."""

    name: str
    how: str
    open: Callable[[str], AbstractAsyncContextManager[Acquire]]
    package: str


@dataclass(frozen=True)
class Round:
    """What some calls took."""

    wall: float
    """Nanoseconds for each."""
    cpu: float
    """Nanoseconds of this process for each."""


@contextlib.contextmanager
def serving() -> Generator[str | None]:
    """A server of our own: its URL, or None where there is none to start."""
    program = shutil.which("redis-server")
    if program is None:
        yield None
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with TemporaryDirectory() as folder:
        options = ["--port", str(port), "--dir", folder, "--save", "", "--appendonly", "no"]
        server = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
        try:
            while server.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.01)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.terminate()
            server.wait()


async def measure(url: str) -> dict[int, dict[str, list[Round]]]:
    """Has all ask in turn, by how many they are."""
    taken: dict[int, dict[str, list[Round]]] = {}
    async with contextlib.AsyncExitStack() as stack:
        acquires = {
            asker.name: await stack.enter_async_context(asker.open(url)) for asker in ASKERS
        }
        order = list(acquires)
        for callers in CALLERS:
            taken[callers] = {name: [] for name in acquires}
            for number in range(ROUNDS + 1):
                for name in order:
                    done = await _round(acquires[name], callers)
                    if number:  # The first makes connections.
                        taken[callers][name].append(done)
                order.append(order.pop(0))
    return taken


async def _round(acquire: Acquire, callers: int) -> Round:
    each = CALLS[callers] // callers

    async def call() -> None:
        for _ in range(each):
            await acquire()

    wall, cpu = time.perf_counter_ns(), time.process_time_ns()
    await asyncio.gather(*(call() for _ in range(callers)))
    wall, cpu = time.perf_counter_ns() - wall, time.process_time_ns() - cpu
    return Round(wall / (each * callers), cpu / (each * callers))


def walls(rounds: list[Round]) -> Samples:
    """How long each call took, in each round."""
    return [one.wall for one in rounds]


def cpus(rounds: list[Round]) -> Samples:
    """The CPU time of each call, in each round."""
    return [one.cpu for one in rounds]


def _ours(**limits: ToolRateLimit) -> Callable[[str], AbstractAsyncContextManager[Acquire]]:
    @contextlib.asynccontextmanager
    async def opened(url: str) -> AsyncGenerator[Acquire]:
        store = f"{url}?prefix=ours-{len(limits)}&timeout=10s"
        async with Limiter(limits, store=store, on_store_error="raise") as limiter:
            yield lambda: limiter.acquire("search")

    return opened


def _client(url: str) -> Redis:
    made: Any = cast("Any", Redis).from_url  # Its keywords have no types.
    return cast("Redis", made(url, max_connections=CONNECTIONS))


@contextlib.asynccontextmanager
async def _bare(url: str) -> AsyncGenerator[Acquire]:
    async with _client(url) as client:
        digest = await client.script_load("return 1")
        yield lambda: client.evalsha(digest, 1, "bare")


@contextlib.asynccontextmanager
async def _same(url: str) -> AsyncGenerator[Acquire]:
    limit = ("1:1:1:0:1000000", 1, 1_000_000, 0, 1, 0)
    async with _client(url) as client:
        digest = await client.script_load(SCRIPT.read_text())
        yield lambda: client.evalsha(digest, 2, "{same}:bucket", "{same}:pause", "take", 1, *limit)


@contextlib.asynccontextmanager
async def _limits(url: str) -> AsyncGenerator[Acquire]:
    storage = limits.aio.storage.RedisStorage(
        f"async+{url}", implementation="redispy", max_connections=CONNECTIONS
    )
    limiter = limits.aio.strategies.FixedWindowRateLimiter(storage)
    item = limits.RateLimitItemPerSecond(RATE)
    yield lambda: limiter.hit(item, "search")


@contextlib.asynccontextmanager
async def _throttled(url: str) -> AsyncGenerator[Acquire]:
    options = {"CONNECTION_POOL_KWARGS": {"max_connections": CONNECTIONS}}
    store = throttled.asyncio.RedisStore(server=url, options=options)
    limiter = throttled.asyncio.Throttled(quota=f"{RATE}/s burst {RATE}", store=store)
    yield lambda: limiter.limit("search")


def _one(**more: Any) -> ToolRateLimit:
    return ToolRateLimit(RATE, burst=RATE, **more)


BARE, OURS, THREE = "redis-py, bare", "callgate", "callgate, three limits"
ASKERS = (
    Asker(BARE, "`evalsha` of `return 1`", _bare, "redis"),
    Asker("redis-py, the same", "`evalsha` of callgate's own script", _same, "redis"),
    Asker(OURS, "`await limiter.acquire(name)`", _ours(search=_one()), "callgate"),
    Asker(
        THREE,
        "the same under three limits",
        _ours(search=_one(), second=_one(tools=["search"]), third=_one(tools=["search"])),
        "callgate",
    ),
    Asker(
        "limits",
        "`limits.aio`, `FixedWindowRateLimiter.hit` by redis-py",
        _limits,
        "limits",
    ),
    Asker("throttled-py", "`throttled.asyncio.Throttled.limit`", _throttled, "throttled-py"),
)
LEAST = {16: {BARE: 2.5}, 256: {BARE: 7.0, "limits": 8.0, "throttled-py": 8.0}}
"""How much longer these are to take than callgate, by how many callers."""
