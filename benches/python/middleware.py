"""Function middleware to measure callgate's against, and the framework's pipeline to run them in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from agent_framework import Content, FunctionInvocationContext, FunctionMiddleware, FunctionTool
from agent_framework._middleware import FunctionMiddlewarePipeline
from asyncio_lock import LockBuckets


class Trivial(FunctionMiddleware):
    """Does nothing, and runs the tool."""

    async def process(
        self, context: FunctionInvocationContext, call_next: Callable[[], Awaitable[None]]
    ) -> None:
        await call_next()


class Silent(FunctionMiddleware):
    """Does nothing, and does not run the tool."""

    async def process(
        self, context: FunctionInvocationContext, call_next: Callable[[], Awaitable[None]]
    ) -> None:
        pass


class LockMiddleware(FunctionMiddleware):
    """Limits by token buckets under an `asyncio.Lock`."""

    def __init__(
        self, limits: Mapping[str, tuple[float, int]], *, structured: bool = False
    ) -> None:
        self._buckets = LockBuckets(limits)
        self._structured = structured

    async def process(
        self, context: FunctionInvocationContext, call_next: Callable[[], Awaitable[None]]
    ) -> None:
        name = context.function.name
        wait = await self._buckets.acquire(name)
        if wait == 0:
            await call_next()
            return
        text = f"Rate limit exceeded for tool '{name}'. Retry in {wait:.3f} seconds."
        if self._structured:
            rate_limit = {"tool": name, "limit": name, "retry_after": wait}
            properties = {"rate_limit": rate_limit}
            context.result = [Content.from_text(text, additional_properties=properties)]
        else:
            context.result = text


def execution(middleware: FunctionMiddleware, tool: str) -> Callable[[], Awaitable[Any]]:
    """A call of a tool, which does nothing, through the framework's pipeline with this middleware.

    Each is a call of its own, and the application runs the agent for a tenant.
    """
    function = FunctionTool(name=tool, func=lambda: "done")
    execute = FunctionMiddlewarePipeline(middleware).execute
    kwargs = {"tenant": "tenant-004711"}

    def call() -> Awaitable[Any]:
        context = FunctionInvocationContext(function, arguments={}, kwargs=kwargs)
        # As the framework does, whose calls come with metadata of its own.
        context.metadata["call_id"] = "call-1"
        return execute(context, _done)

    return call


async def _done(context: FunctionInvocationContext) -> str:
    return "done"
