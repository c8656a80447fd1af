"""A second process that draws from the same store, when it is told to."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from timing import Batch

IN_A_ROW = 256


@contextmanager
def neighbour(
    make: Callable[[str], Any], store: str, tool: str
) -> Generator[Callable[[Batch], Batch]]:
    """Starts the process, which is idle but for batches that are to run beside it.

    Args:
        make: Makes the process's limiter, of a store; a function of a module.
        store: The store's URL.
        tool: The tool that it asks for.

    Yields:
        What makes of a batch the same one while the process asks all the time.
    """
    context = multiprocessing.get_context("spawn")
    go, busy = context.Event(), context.Event()
    process = context.Process(target=_ask, args=(make, store, tool, go, busy), daemon=True)
    process.start()

    def beside(batch: Batch) -> Batch:
        async def noisy() -> float:
            go.set()
            if not busy.wait(60):
                raise TimeoutError("the second process does not start")
            try:
                return await batch()
            finally:
                go.clear()
                while busy.is_set():
                    pass

        return noisy

    try:
        yield beside
    finally:
        process.kill()
        process.join()


def _ask(make: Callable[[str], Any], store: str, tool: str, go: Any, busy: Any) -> None:
    ask = make(store).try_acquire
    while True:
        go.wait()
        busy.set()
        while go.is_set():
            for _ in range(IN_A_ROW):
                ask(tool)
        busy.clear()
