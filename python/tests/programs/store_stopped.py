"""Stops a process just when it has the store's lock, and asks beside it.

Says why a call is refused that needs the lock and whether one runs that does not; and, once the process goes on,
the same of the former, and how long that took.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import sys
import time

from callgate import Limiter, ToolRateLimit

URL = sys.argv[1]
LIMITS = {
    "one": ToolRateLimit(1e9, 2**32 - 1),
    "two": ToolRateLimit(1e9, 2**32 - 1),
    "both": ToolRateLimit(1e9, 2**32 - 1, tools="two"),
}


def is_locked() -> bool:
    """Whether somebody has the lock."""
    file = os.open(f"{URL.removeprefix('shm:')}.v1", os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(file)


def stop_with_the_lock(process: int) -> None:
    """Stops and resumes it until it is stopped at the worst time."""
    while True:
        os.kill(process, signal.SIGSTOP)
        os.waitpid(process, os.WUNTRACED)
        if is_locked():
            return
        os.kill(process, signal.SIGCONT)
        time.sleep(0.0001)


def main() -> None:
    """Runs it."""
    logging.getLogger("callgate").addHandler(logging.NullHandler())  # It tells of the lock.
    limiter = Limiter(LIMITS, store=URL)
    process = os.fork()
    while process == 0:
        limiter.try_acquire("two")
    try:
        stop_with_the_lock(process)
        alone = limiter.try_acquire("one").admitted
        stopped = limiter.try_acquire("two").reason
        begin = time.monotonic()
        os.kill(process, signal.SIGCONT)
        # The process asks all the time: the lock is free now and then.
        while (resumed := limiter.try_acquire("two").reason) and time.monotonic() < begin + 10:
            pass
        seconds = time.monotonic() - begin
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    said = {"alone": alone, "stopped": stopped, "resumed": resumed, "seconds": seconds}
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
