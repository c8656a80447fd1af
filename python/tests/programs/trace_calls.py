"""Traces calls: so many, and ends at once; or without end, and says when the first are written."""

from __future__ import annotations

import sys

from callgate import Trace
from tests.traced import trace_call

TRACE = Trace(sys.argv[1], rotate_at=int(sys.argv[2]), keep=1000)
COUNT = int(sys.argv[3]) if len(sys.argv) > 3 else sys.maxsize

for number in range(COUNT):
    trace_call(TRACE, tenant=str(number))
    if number == 1000:
        TRACE.flush()
        sys.stdout.write("written\n")
        sys.stdout.flush()
