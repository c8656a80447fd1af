"""Admission control for AI agents' tool calls.

Before a tool runs, a `Limiter` decides whether it may run now, so that concurrent calls never
exceed the quota of the service behind the tool. The front end for Microsoft Agent Framework is
`callgate.agent_framework`.

Example:
    >>> from callgate import Limiter, ToolRateLimit
    >>> limiter = Limiter({"lookup_customer": ToolRateLimit(requests_per_second=2, burst=2)})
    >>> [limiter.try_acquire("lookup_customer").admitted for _ in range(3)]
    [True, True, False]

    One budget for several tools, a bucket of it for each tenant, and a limit for all other tools:

    >>> crm = ToolRateLimit.quota(100, per="min", tools=["crm_*"], fields=["tenant"])
    >>> limiter = Limiter({"crm": crm}, default=ToolRateLimit.parse("10/s", burst=10))
    >>> bool(limiter.try_acquire("crm_search", tenant="acme"))
    True
"""

import atexit
import os

from callgate import _callgate, _limiter
from callgate._callgate import (
    Decision,
    LimitSnapshot,
    StoreCounts,
    ToolRateLimit,
    Trace,
    __version__,
)
from callgate._errors import CallgateError, ConfigError, RateLimitExceeded, StoreError
from callgate._limiter import Limiter

if hasattr(os, "register_at_fork"):
    # A child counts what it decides itself: its parent goes on reporting what came before. And it has only
    # the one thread: none of the parent's others waits in it, or runs calls.
    os.register_at_fork(
        before=_callgate.before_fork,
        after_in_parent=_callgate.after_fork_in_parent,
        after_in_child=_callgate.after_fork,
    )
    os.register_at_fork(after_in_child=_callgate.reset_decision_counts)
    os.register_at_fork(after_in_child=_limiter.after_fork)

atexit.register(_callgate.flush_traces)
atexit.register(_callgate.flush_log)

__all__ = [
    "CallgateError",
    "ConfigError",
    "Decision",
    "LimitSnapshot",
    "Limiter",
    "RateLimitExceeded",
    "StoreCounts",
    "StoreError",
    "ToolRateLimit",
    "Trace",
    "__version__",
]
