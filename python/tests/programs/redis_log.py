"""Ends when its store has just failed, and nobody has said so yet."""

from __future__ import annotations

import logging
import os
import signal
import sys

from callgate import Limiter, ToolRateLimit
from callgate._callgate import store_counts

URL, SERVER = sys.argv[1:]
logging.basicConfig(stream=sys.stdout)
LIMITER = Limiter({"search": ToolRateLimit(1, 5)}, store=URL)
assert LIMITER.try_acquire("search")
os.kill(int(SERVER), signal.SIGSTOP)
assert LIMITER.try_acquire("search")
while not any(counts.is_down for _, counts in store_counts()):
    pass
