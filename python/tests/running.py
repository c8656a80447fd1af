"""Runs threads at the same moment, forked children, and programs of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

THREADS = 4
"""How many threads start at the same moment."""

LONGEST = 60
"""Seconds after which a program counts as hung."""

EXAMPLES = Path(__file__).parents[2] / "examples" / "agent_framework"


def run_program(program: Path, *arguments: str, warnings: str = "error") -> str:
    """Runs a Python program with the packages of this interpreter and the examples' modules.

    Args:
        program: Its file.
        arguments: Its arguments.
        warnings: What becomes of its warnings.

    Returns:
        What it printed. It must end well and have no word on standard error.
    """
    path = os.pathsep.join([*filter(None, sys.path), str(EXAMPLES)])
    done = subprocess.run(
        [sys.executable, "-W", warnings, str(program), *arguments],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert not done.stderr, done.stderr
    return done.stdout


def hammer(ask: Callable[[int], int]) -> int:
    """Asks from several threads that start at the same moment; sums up what was admitted."""
    admitted: list[int] = []
    barrier = threading.Barrier(THREADS)

    def work(number: int) -> None:
        barrier.wait()
        admitted.append(ask(number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(admitted) == THREADS
    return sum(admitted)


def forked(say: Callable[[], str], deadline: float) -> str:
    """Forks this process.

    Args:
        say: What the child does, and then has to say.
        deadline: Seconds after which it counts as hung.

    Returns:
        What it said: nothing where it failed, and "hung" where it had to be ended.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(writing, say().encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    end = time.monotonic() + deadline
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return "hung"
        time.sleep(0.001)
    with os.fdopen(reading) as pipe:
        return pipe.read()
