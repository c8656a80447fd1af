"""Runs an agent under the framework's own instrumentation, and says which spans there are.

The arguments are the form of the rejection (or `dry run`), and `run` or `stream`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from agent_framework import Agent, FunctionInvocationContext, tool
from agent_framework.observability import enable_instrumentation
from offline import OfflineChatClient
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from callgate import Decision, Limiter, ToolRateLimit
from callgate.agent_framework import ToolRateLimitMiddleware


def in_other_words(context: FunctionInvocationContext, decision: Decision) -> str:
    """A rejection in the user's words."""
    return f"{decision.tool} is busy"


@tool(approval_mode="never_require")
async def lookup() -> str:
    """Finds something."""
    return "found"


async def run(middleware: ToolRateLimitMiddleware) -> None:
    """One call is admitted and one is rejected."""
    client = OfflineChatClient([("c1", "lookup", {}), ("c2", "lookup", {})], "done")
    agent = Agent(client=client, name="tester", tools=[lookup], middleware=[middleware])
    if sys.argv[2] == "stream":
        updates = agent.run("go", stream=True)
        async for _ in updates:
            pass
        await updates.get_final_response()
    else:
        await agent.run("go")


def main() -> None:
    """Runs it."""
    form: Any = {"callable": in_other_words, "dry run": "result"}.get(sys.argv[1], sys.argv[1])
    limits = {"lookup": ToolRateLimit(1, 1)}
    limiter = Limiter(limits, dry_run=sys.argv[1] == "dry run", clock=lambda: 0.0)
    middleware = ToolRateLimitMiddleware(limiter, on_rejected=form)
    # The provider comes after the middleware, as where an application sets up late.
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    enable_instrumentation()
    failed = None
    try:
        asyncio.run(run(middleware))
    except Exception as error:  # noqa: BLE001 - the test looks at it
        failed = type(error).__name__
    spans = exporter.get_finished_spans()
    names = {span.context.span_id: span.name for span in spans if span.context}
    said = [
        {
            "name": span.name,
            "trace": span.context.trace_id if span.context else None,
            "parent": names.get(span.parent.span_id) if span.parent else None,
            "attributes": dict(span.attributes or {}),
        }
        for span in spans
    ]
    json.dump({"spans": said, "failed": failed}, sys.stdout)


main()
