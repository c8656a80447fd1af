"""Rate limits for the tools of Microsoft Agent Framework agents, as function middleware.

Example:
    >>> from callgate.agent_framework import ToolRateLimit, ToolRateLimitMiddleware
    >>> rate_limiter = ToolRateLimitMiddleware({
    ...     "lookup_customer": ToolRateLimit(requests_per_second=2, burst=2),
    ... })

    Then ``Agent(client=client, tools=[...], middleware=[rate_limiter])``.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, TypeAlias

try:
    import agent_framework
    from agent_framework import (
        Content,
        FunctionInvocationContext,
        FunctionMiddleware,
        MiddlewareTermination,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "callgate.agent_framework needs Agent Framework: pip install 'callgate[agent-framework]'",
        name=error.name,
    ) from error

from callgate._callgate import Decision, Limiter, ToolRateLimit
from callgate._errors import ConfigError, RateLimitExceeded, describe
from callgate._telemetry import record_rejection

__all__ = ["OnRejected", "ToolRateLimit", "ToolRateLimitMiddleware"]

OnRejected: TypeAlias = (
    Literal["result", "raise", "terminate"] | Callable[[FunctionInvocationContext, Decision], Any]
)
"""What becomes of a rejected call: see `ToolRateLimitMiddleware`."""


class ToolRateLimitMiddleware(FunctionMiddleware):
    """Admits or rejects each tool call of an agent before the tool runs.

    Register it on an agent, on one run or on a chat client. One instance may serve any number of
    agents, threads and event loops at once; all that hold it (or its `Limiter`) share one quota.
    A tool that no limit names is not limited.

    A token is spent when a call is admitted, whatever becomes of the call, and nothing is locked
    or held while the tool runs.

    Example:
        >>> from callgate import Limiter, ToolRateLimit
        >>> from callgate.agent_framework import ToolRateLimitMiddleware
        >>> limiter = Limiter({"search": ToolRateLimit(10, burst=10)})
        >>> for_reader = ToolRateLimitMiddleware(limiter)
        >>> for_writer = ToolRateLimitMiddleware(limiter, on_rejected="terminate")
        >>> for_reader.limiter is for_writer.limiter
        True
    """

    def __init__(
        self,
        limits: Mapping[str, ToolRateLimit] | Limiter,
        *,
        on_rejected: OnRejected = "result",
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Makes the middleware, and a limiter of its own unless it is given one.

        Args:
            limits: The limit of each tool, by the tool's name, or a limiter to share.
            on_rejected: What becomes of a rejected call. With ``"result"`` the model reads, as the
                call's result, that the limit was exceeded and when to retry. With ``"raise"`` the
                run ends with the framework's ``MiddlewareFailure``, whose cause is a
                `RateLimitExceeded` (agent-framework-core 1.15 and later; the framework then
                cancels the calls beside it). With ``"terminate"`` the tool loop ends with the
                result that ``"result"`` gives. A callable (plain or async) is given the context
                and the decision, and what it returns is the call's result (a Content is put in a
                list, as the framework needs it); None keeps what `context.result` then is, by
                default the usual result.
            clock: The time in seconds, for tests; as in `Limiter`, and not beside one.

        Raises:
            ConfigError: If a value is not what it should be.
        """
        if not isinstance(limits, Limiter):
            limits = Limiter(limits, clock=clock)
        elif clock is not None:
            raise ConfigError("clock must be given to the Limiter where one is shared, got both")
        form = on_rejected if isinstance(on_rejected, str) else "call"
        if form not in ("result", "raise", "terminate") and not callable(on_rejected):
            raise ConfigError(
                f"on_rejected must be 'result', 'raise', 'terminate' or a callable, got {on_rejected!r}"
            )
        if form == "raise" and not hasattr(agent_framework, "MiddlewareFailure"):
            raise ConfigError(
                "on_rejected must be 'result', 'terminate' or a callable with agent-framework-core below 1.15, "
                "got 'raise'"
            )
        self._limiter = limits
        self._admit = limits._admit
        self._form = form
        self._on_rejected = on_rejected

    @property
    def limiter(self) -> Limiter:
        """The limiter that decides."""
        return self._limiter

    async def process(
        self, context: FunctionInvocationContext, call_next: Callable[[], Awaitable[None]]
    ) -> None:
        """Runs the tool, or answers in its place.

        Args:
            context: The call.
            call_next: Runs the rest of the middleware and the tool.
        """
        rejected = self._admit(context.function.name)
        if rejected is None:
            # Of an earlier attempt, where middleware around this one retries.
            context.metadata.pop("rate_limit", None)
            await call_next()
        else:
            await self._reject(context, rejected)

    async def _reject(self, context: FunctionInvocationContext, decision: Decision) -> None:
        record_rejection(decision, context.metadata.get("call_id"))
        context.metadata["rate_limit"] = decision
        message = describe(decision)
        if self._form == "raise":
            raise agent_framework.MiddlewareFailure(message) from RateLimitExceeded(decision)
        # A list, since the framework turns a bare Content into text and drops its properties.
        context.result = [_content(message, decision)]
        if self._form == "terminate":
            raise MiddlewareTermination(message, result=context.result)
        if callable(self._on_rejected):
            result = self._on_rejected(context, decision)
            if inspect.isawaitable(result):
                result = await result
            if result is not None:
                context.result = [result] if isinstance(result, Content) else result


def _content(message: str, decision: Decision) -> Content:
    """What the model reads, with what programs read."""
    rate_limit = {
        "tool": decision.tool,
        "limit": decision.limit,
        "reason": decision.reason,
        "remaining": decision.remaining,
        "retry_after": decision.retry_after,
    }
    return Content.from_text(message, additional_properties={"rate_limit": rate_limit})
