"""Ends while a daemon thread waits, and holds a permit that it never released."""

from __future__ import annotations

import sys
import threading
import time

from callgate import Limiter, ToolRateLimit

LIMITER = Limiter({"search": ToolRateLimit(1e6, 1000, max_concurrent=1, max_wait=86_400)})
RUNNING = LIMITER.try_acquire("search")

thread = threading.Thread(target=LIMITER.acquire_sync, args=("search",), daemon=True)
thread.start()
time.sleep(0.1)
sys.stdout.write(f"{thread.is_alive()}\n")
