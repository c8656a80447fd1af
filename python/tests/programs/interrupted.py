"""Is interrupted while it waits, in a thread or in a loop; sees that its place was given up, and ends by that."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time

from callgate import Limiter, ToolRateLimit

# Nothing comes in by itself.
LIMITER = Limiter({"search": ToolRateLimit(1e6, 1000, max_concurrent=1, max_wait=86_400)})


def interrupt() -> None:
    """Interrupts the main thread, most likely when it waits."""
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)


def main() -> None:
    """Runs it."""
    with LIMITER.try_acquire("search"):
        threading.Thread(target=interrupt).start()
        try:
            if sys.argv[1] == "loop":
                asyncio.run(LIMITER.acquire("search"))
            else:
                LIMITER.acquire_sync("search")
        except KeyboardInterrupt:
            sys.stdout.write("interrupted\n")
    with LIMITER.try_acquire("search") as decision:
        sys.stdout.write(f"{decision.admitted}\n")
    sys.stdout.flush()
    signal.raise_signal(signal.SIGINT)


if __name__ == "__main__":
    main()
