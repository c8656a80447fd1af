"""Admission control for AI agents' tool calls.

Before a tool runs, a `Limiter` decides whether it may run now, so that concurrent calls never
exceed the quota of the service behind the tool. The front end for Microsoft Agent Framework is
`callgate.agent_framework`.

Example:
    >>> from callgate import Limiter, ToolRateLimit
    >>> limiter = Limiter({"lookup_customer": ToolRateLimit(requests_per_second=2, burst=2)})
    >>> [limiter.try_acquire("lookup_customer").admitted for _ in range(3)]
    [True, True, False]
"""

from callgate._callgate import Decision, Limiter, LimitSnapshot, ToolRateLimit, __version__
from callgate._errors import CallgateError, ConfigError, RateLimitExceeded, StoreError

__all__ = [
    "CallgateError",
    "ConfigError",
    "Decision",
    "LimitSnapshot",
    "Limiter",
    "RateLimitExceeded",
    "StoreError",
    "ToolRateLimit",
    "__version__",
]
