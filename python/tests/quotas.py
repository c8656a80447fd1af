"""Limits that hold still, and processes that share them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from callgate import Limiter, ToolRateLimit

from .running import forked


def hourly(burst: int, **options: Any) -> ToolRateLimit:
    """A limit that refills too slowly for a test to see."""
    return ToolRateLimit.parse("1/h", burst, **options)


MIXED = {
    "crm": hourly(6, tools=["crm_*", "lookup"], per=["tenant"]),
    "lookup": hourly(20),
    "pairs": hourly(2, tools="crm_*", per=["tenant", "user"]),
}


def in_another(say: Callable[[], object]) -> Any:
    """What another process has to say, which makes its limiters itself."""
    return json.loads(forked(lambda: json.dumps(say()), 20))


def admitted(limiter: Limiter, tool: str = "search", times: int = 1, **options: Any) -> int:
    """How many calls of so many are admitted."""
    return sum(limiter.try_acquire(tool, **options).admitted for _ in range(times))
