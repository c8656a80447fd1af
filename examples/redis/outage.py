"""Four processes, as on four hosts, with one quota in Redis; and what becomes of calls while it is down.

The search service takes 20 calls at once, and 60 more an hour. Each process asks for 10 calls from an event loop,
first while the server is there, and then when it has been stopped: a bucket of the process's own decides, or nothing
may run.

Runs offline, and needs a redis-server on the PATH: python examples/redis/outage.py
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.queues import Queue
from tempfile import TemporaryDirectory
from typing import Literal

from callgate import Limiter, ToolRateLimit

PROCESSES = 4
CALLS = 10
BURST = 20


async def ask(store: str, on_store_error: Literal["local", "deny"]) -> int:
    """What each process does: asks for some calls at once, and counts those that may run."""
    limit = ToolRateLimit.parse("60/h", burst=BURST)
    async with Limiter({"search": limit}, store=store, on_store_error=on_store_error) as limiter:
        asked = (limiter.acquire("search") for _ in range(CALLS))
        return sum(decision.admitted for decision in await asyncio.gather(*asked))


def main() -> None:
    """Runs the processes with a server, and then without."""
    with server() as store:
        print("With the server:")
        run(store, "local")
    print("\nIt is down, and each process decides by itself ('local'):")
    run(store, "local")
    print("\nIt is down, and nothing may run ('deny'):")
    run(store, "deny")


def run(store: str, on_store_error: Literal["local", "deny"]) -> None:
    """Starts the processes, and prints how many calls each of them was admitted."""
    context = get_context("spawn")
    admitted: Queue[int] = context.Queue()
    arguments = (store, on_store_error, admitted)
    processes = [context.Process(target=work, args=arguments) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    counts = [admitted.get(timeout=30) for _ in processes]
    for process in processes:
        process.join()
    each = " + ".join(map(str, sorted(counts, reverse=True)))
    print(f"  {each} = {sum(counts)} of {PROCESSES * CALLS} calls ran; the service takes {BURST}.")


def work(store: str, on_store_error: Literal["local", "deny"], admitted: Queue[int]) -> None:
    """A process."""
    # It warns when the store goes down; what is printed here tells of that.
    logging.getLogger("callgate").addHandler(logging.NullHandler())
    admitted.put(asyncio.run(ask(store, on_store_error)))


@contextmanager
def server() -> Generator[str]:
    """A Redis server, and its URL as a store."""
    program = shutil.which("redis-server")
    if program is None:
        sys.exit("this example needs redis-server on the PATH (Debian: apt install redis-server)")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with TemporaryDirectory() as folder:
        options = ["--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        process = subprocess.Popen([program, *options], cwd=folder, stdout=subprocess.DEVNULL)  # noqa: S603
        try:
            while process.poll() is None and not listens(port):
                time.sleep(0.01)
            yield f"redis://127.0.0.1:{port}/0?prefix=example"
        finally:
            process.terminate()
            process.wait()


def listens(port: int) -> bool:
    """Whether somebody listens at a port of this host."""
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


if __name__ == "__main__":
    main()
