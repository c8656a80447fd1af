"""Forks ten times while a thread keeps a trace busy; each child traces a call, and one more in a child of its own."""

from __future__ import annotations

import json
import sys
import threading
import time

from callgate import Trace
from tests.running import forked
from tests.traced import trace_call

DEADLINE = 10.0
TRACE = Trace(sys.argv[1])


def grandchild() -> str:
    """Traces a call two forks away from the first thread that wrote."""
    trace_call(TRACE, "grandchild")
    return json.dumps([TRACE.flush(), TRACE.dropped])


def child() -> str:
    """Traces a call a fork away from the first thread that wrote."""
    trace_call(TRACE, "child")
    return json.dumps([TRACE.flush(), TRACE.dropped, json.loads(forked(grandchild, DEADLINE))])


def main() -> None:
    """Runs it."""
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            trace_call(TRACE, "parent")
            time.sleep(0)

    busy = threading.Thread(target=keep_busy)
    busy.start()
    children = [json.loads(forked(child, DEADLINE)) for _ in range(10)]
    stop.set()
    busy.join()
    trace_call(TRACE, "last")
    json.dump({"children": children, "parent": [TRACE.flush(), TRACE.dropped]}, sys.stdout)


if __name__ == "__main__":
    main()
