"""Traces calls to a disk that is full after 6,000 bytes, and has room again later."""

from __future__ import annotations

import json
import logging
import resource
import sys

from callgate import Trace
from tests.traced import trace_call

TRACE = Trace(sys.argv[1])
said: list[str] = []


class Keep(logging.Handler):
    """Keeps what is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        said.append(record.getMessage())


logging.getLogger("callgate").addHandler(Keep())
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
# A write beyond it fails, as on a full disk, after what still fits was written. (Python ignores SIGXFSZ.)
resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, most))
for number in range(200):
    trace_call(TRACE, tenant=str(number))
    if number % 10 == 9:
        TRACE.flush()
dropped = TRACE.dropped
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
trace_call(TRACE, "last")
TRACE.flush()
json.dump({"dropped": [dropped, TRACE.dropped], "said": said}, sys.stdout)
