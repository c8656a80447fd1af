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
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext, suppress
from os import PathLike
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

from callgate._callgate import Decision, ToolRateLimit, Trace, TracedCall, Turn
from callgate._errors import CallgateError, ConfigError, RateLimitExceeded, StoreError, describe
from callgate._limiter import Limiter, wait
from callgate._retry_after import retry_after
from callgate._telemetry import record_rejection

__all__ = ["OnRejected", "ToolRateLimit", "ToolRateLimitMiddleware"]

OnRejected: TypeAlias = (
    Literal["result", "raise", "terminate"] | Callable[[FunctionInvocationContext, Decision], Any]
)
"""What becomes of a rejected call: see `ToolRateLimitMiddleware`."""

_logger = logging.getLogger("callgate")


class ToolRateLimitMiddleware(FunctionMiddleware):
    """Admits or rejects each tool call of an agent before the tool runs, or has it wait for its turn.

    Register it on an agent, on one run or on a chat client. One instance may serve any number of
    agents, threads and event loops at once; all that hold it (or its `Limiter`) share one quota.
    A tool that no limit holds for is not limited. A limiter that is registered several times on the
    way to a call (with an agent and with a run, say) charges it once; where middleware in between
    makes several calls of one, in tasks of their own or one after another, each of them is charged.

    A Redis store is asked without blocking the event loop. Where it fails, the limits' `on_store_error` says what
    becomes of a call: with ``"deny"`` the model reads that the limit cannot be checked; with ``"raise"`` the
    run ends with the framework's ``MiddlewareFailure``, whose cause is a `StoreError` (below
    agent-framework-core 1.15 the model reads that the function failed). The tool runs in neither case.

    A call that a limit's `max_wait` lets wait does so inside of the run: to cancel the run is to give up the
    place. A token is spent when a call is admitted, whatever becomes of the call. Nothing is locked while the
    tool runs, and nothing is held but its place among the `max_concurrent` that may run, until it ends or is
    cancelled. (Where the framework runs plain functions in threads, one goes on when its call is cancelled,
    and is not counted any more.) An agent that is used as a tool runs as long as its own calls: where one
    limit holds for both, they need places beside it.

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
        fields: Callable[[FunctionInvocationContext], Mapping[str, str | int | None]] | None = None,
        cost: Callable[[FunctionInvocationContext], int | None] | None = None,
        on_rejected: OnRejected = "result",
        pause_on_retry_after: bool = False,
        trace: Trace | str | PathLike[str] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Makes the middleware, and a limiter of its own unless it is given one.

        Args:
            limits: The limits by name, as in `Limiter`, or a limiter to share: one that is made with a
                default, from a file or for a dry run.
            fields: Returns the fields of a call, such as ``{"tenant": "acme"}``; asked where a limit that
                holds for the tool is split by some. By default each such field is taken from
                ``context.kwargs``, which are what the application passes to the run for its tools
                (``function_invocation_kwargs``), and ``session`` is the id of the run's session (a run
                that is given none has one of its own). None of it comes from the model. Calls without a
                field, or with None, share the one bucket for that, and a warning is logged once for each
                tool and field.
            cost: Returns the cost of a call in tokens, a whole number of at least 1, or None for what the
                limits say. Where it or `fields` fails or returns something else, the tool does not run,
                nothing is spent, and the error is logged, since the framework keeps it to itself.
            on_rejected: What becomes of a rejected call. With ``"result"`` the model reads, as the
                call's result, that the limit was exceeded and when to retry. With ``"raise"`` the
                run ends with the framework's ``MiddlewareFailure``, whose cause is a
                `RateLimitExceeded` (agent-framework-core 1.15 and later; the framework then
                cancels the calls beside it). With ``"terminate"`` the tool loop ends with the
                result that ``"result"`` gives. A callable (plain or async) is given the context
                and the decision, and what it returns is the call's result (a Content is put in a
                list, as the framework needs it); None keeps what `context.result` then is, by
                default the usual result.
            pause_on_retry_after: Whether to pause the tool (see `Limiter.pause`) when it raises an HTTP
                error with status 429 or 503 whose ``Retry-After`` says for how long: one with a
                ``response`` that has ``status_code`` and ``headers``, as of httpx, requests and the
                SDKs built on them, or an error that wraps one. The error goes on as before. Tools of MCP
                servers do not pause: their SDK passes no ``Retry-After`` on.
            trace: A trace, or the file of one, to which a line is added for each call once it has ended: the
                time, the tool, the fields and the cost, how long it waited and ran, and ``"ok"``, ``"error"``
                (it raised one), ``"cancelled"`` or ``"rejected"``. With a trace, `fields` is asked for each
                call; by default the fields are those that limits are split by. In a dry run the line says
                what became of the call. A call that is not decided on has no line, nor has one that is
                charged further out, where the limiter is registered twice: its line is written there.
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
        # Its type says so, but not everybody checks types.
        if not isinstance(pause_on_retry_after, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"pause_on_retry_after must be True or False, got {pause_on_retry_after!r}"
            )
        for name, given in (("fields", fields), ("cost", cost)):
            if given is not None and not callable(given):
                raise ConfigError(
                    f"{name} must be a callable that takes the context, got {given!r}"
                )
            if inspect.iscoroutinefunction(given):
                raise ConfigError(
                    f"{name} must be a plain function, since a decision waits for nothing, got {given!r}"
                )
        self._trace = _trace(trace)
        self._limiter = limits
        self._admit = limits._admit
        self._find = _find_fields if fields is None else _find_by(fields)
        self._cost = cost
        self._pauses = pause_on_retry_after
        self._key = f"callgate.{id(limits)}"
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
        metadata = context.metadata
        held: Decision | None = None
        traced: TracedCall | None = None
        receipt = metadata.get(self._key)
        if receipt is not None and _is_for(receipt):
            # The innermost ends the call: an attempt from further out is another one.
            held = receipt.pop()
        else:
            if receipt is not None:
                # Of an earlier attempt, where middleware around this one retries.
                metadata.pop("rate_limit", None)
            name = context.function.name
            try:
                if self._trace is not None:
                    traced = TracedCall(self._trace)
                    held = await self._decide(context, traced)
                else:
                    begun = (
                        self._admit(name, context, self._find)
                        if self._cost is None
                        else self._admit(name, context, self._find, self._cost(context))
                    )
                    if begun is not None:
                        held = await wait(begun) if isinstance(begun, Turn) else begun
            except Exception as error:
                # The framework says no more of it than "Function failed.", to the model.
                _log_failure(name, error)
                _end_run_by(error, name)
                raise
            if held is not None:
                if held.reason is not None:
                    record_rejection(held, metadata.get("call_id"))
                if not held.admitted:
                    await self._reject(context, held)
                    return
        # Kept while the call runs, for `_is_for` to find.
        charged = metadata[self._key] = [held]
        if held is None and not self._pauses and traced is None:
            await call_next()
        else:
            with held or nullcontext():
                await self._run(context.function.name, call_next, traced)
        del charged

    async def _decide(
        self, context: FunctionInvocationContext, traced: TracedCall
    ) -> Decision | None:
        """The decision on a call that is traced, where it is to be looked at."""
        cost = None if self._cost is None else self._cost(context)
        try:
            begun = self._admit(context.function.name, context, self._find, cost, traced)
            decision = await wait(begun) if isinstance(begun, Turn) else begun
        except BaseException as error:
            traced.ended(error)
            raise
        waited = isinstance(begun, Turn) and begun.has_waited()
        traced.decided(admitted=decision is None or decision.admitted, waited=waited)
        return decision

    async def _run(
        self, name: str, call_next: Callable[[], Awaitable[None]], traced: TracedCall | None
    ) -> None:
        """Runs a call, traces its end, and pauses its tool where the service behind it asks for that."""
        try:
            await call_next()
        except BaseException as error:
            if traced is not None:
                # A call may end the loop of tools by this, and has not failed.
                traced.ended(None if isinstance(error, MiddlewareTermination) else error)
            if (
                self._pauses
                and isinstance(error, Exception)
                and (seconds := retry_after(error)) is not None
            ):
                # A tool without a limit has nothing to pause.
                with suppress(ConfigError):
                    self._limiter.pause(name, seconds)
            raise
        if traced is not None:
            traced.ended()

    async def _reject(self, context: FunctionInvocationContext, decision: Decision) -> None:
        context.metadata["rate_limit"] = decision
        context.metadata[self._key] = []
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


def _trace(trace: Trace | str | PathLike[str] | None) -> Trace | None:
    if trace is None or isinstance(trace, Trace):
        return trace
    # Its type says so, but not everybody checks types.
    if not isinstance(trace, (str, PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"trace must be a Trace or a file's path, got {trace!r}")
    return Trace(trace)


def _log_failure(tool: str, error: Exception) -> None:
    """Says why a call was not decided on: of errors of callgate's own, their messages say all."""
    trace = None if isinstance(error, CallgateError) else error
    _logger.error(
        "A call of tool %r was not decided on, and not run: %s", tool, error, exc_info=trace
    )


def _end_run_by(error: Exception, tool: str) -> None:
    """Ends the run where a store failed and that is to be an error, if the framework can."""
    if isinstance(error, StoreError) and hasattr(agent_framework, "MiddlewareFailure"):
        message = f"The rate limit of tool {tool!r} cannot be checked."
        raise agent_framework.MiddlewareFailure(message) from error


def _is_for(receipt: list[Decision | None]) -> bool:
    """Whether a limiter has charged this very call further out, where it is registered twice.

    Then the middleware that did waits for this one, and it keeps the receipt that it left with the call: what
    is to be held while the call runs. A receipt is good for one call, which takes that out of it: attempts,
    and what middleware in between makes of one call, are charged.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _PROCESS and frame.f_locals.get("charged") is receipt:
            return bool(receipt)
        frame = frame.f_back
    return False


_PROCESS = ToolRateLimitMiddleware.process.__code__


def _find_fields(context: FunctionInvocationContext, names: tuple[str, ...]) -> dict[str, Any]:
    """The fields that a call has by itself."""
    given = context.kwargs
    fields: dict[str, Any] = {}
    for name in names:
        # Under "session" the framework itself puts the session among what is given.
        value = given.get(name) if name != "session" else _session_id(context)
        if value is None:
            place = "session" if name == "session" else "function_invocation_kwargs"
            _warn_of_missing(context.function.name, name, f"the run's {place}")
        fields[name] = value
    return fields


def _session_id(context: FunctionInvocationContext) -> str | None:
    return None if context.session is None else context.session.session_id


def _find_by(
    fields: Callable[[FunctionInvocationContext], Mapping[str, str | int | None]],
) -> Callable[[FunctionInvocationContext, tuple[str, ...]], Mapping[str, str | int | None]]:
    """The fields as a callable of the user's gives them."""

    def find(
        context: FunctionInvocationContext, names: tuple[str, ...]
    ) -> Mapping[str, str | int | None]:
        found = fields(context)
        # What is no mapping in spite of its type is refused where it goes. (dict is there for speed.)
        if isinstance(found, (dict, Mapping)):  # pyright: ignore[reportUnnecessaryIsInstance]
            for name in names:
                if found.get(name) is None:
                    _warn_of_missing(context.function.name, name, "what `fields` returns")
        return found

    return find


_MOST_WARNINGS = 1000
_warned: set[tuple[str, str]] = set()
"""The tools and fields that were warned of, in this process."""


def _warn_of_missing(tool: str, field: str, place: str) -> None:
    """Says that calls share a bucket which a limit meant to split: once a process for each tool and field."""
    if (tool, field) in _warned or len(_warned) >= _MOST_WARNINGS:
        return
    _warned.add((tool, field))
    _logger.warning(
        "Tool %r is called without %r, which a limit is split by: all such calls share one bucket. "
        "The field is looked for in %s.",
        tool,
        field,
        place,
    )


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
