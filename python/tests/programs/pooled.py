"""Asks for more tenants than a limit keeps buckets for, and says what then becomes of them."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from callgate import Limiter, ToolRateLimit

TENANTS = 1_150_000


class Records(logging.Handler):
    """Notes what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[list[str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append([record.name, record.levelname, record.getMessage()])


def main() -> None:
    """Runs it."""
    records = Records()
    logging.getLogger("callgate").addHandler(records)
    limiter = Limiter(
        {"lookup": ToolRateLimit.parse("1/h", 3, per=["tenant"])}, clock=lambda: 1000.0
    )
    ask = limiter.try_acquire
    blocked = [ask("lookup", tenant="blocked").admitted for _ in range(4)]
    admitted = sum(ask("lookup", tenant=tenant).admitted for tenant in range(TENANTS))
    known = sum(ask("lookup", tenant=tenant, cost=3).admitted for tenant in range(0, TENANTS, 1000))
    blocked.append(ask("lookup", tenant="blocked").admitted)
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) if "VmHWM:" in status else 0
    said = {
        "admitted": admitted,
        "known": known,
        "blocked": blocked,
        "buckets": limiter.snapshot()["lookup"].buckets,
        "logged": records.said,
        "peak": peak,
    }
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
