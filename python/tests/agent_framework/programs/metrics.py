"""Makes decisions, and says what a metrics provider reads of them after each step.

The argument says when the application sets its provider: `first`, or `last`, when the middleware
has been made and used.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from typing import Any

from agent_framework import Agent, tool
from offline import OfflineChatClient, Turn
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

READER = InMemoryMetricReader()


def set_provider() -> None:
    """What an application does once."""
    metrics.set_meter_provider(MeterProvider([READER]))


if sys.argv[1] == "first":
    set_provider()

from callgate import Limiter, ToolRateLimit  # noqa: E402

EARLY = Limiter({"early": ToolRateLimit(1, 1)}, clock=lambda: 0.0)
EARLY.try_acquire("early")

from callgate.agent_framework import ToolRateLimitMiddleware  # noqa: E402


def read() -> dict[str, Any]:
    """The counter as an exporter gets it."""
    data = READER.get_metrics_data()
    assert data is not None
    [found] = [
        metric
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if scope.scope.name == "callgate"
    ]
    described = json.loads(found.to_json())
    points = {
        json.dumps(point["attributes"], sort_keys=True): point["value"]
        for point in described["data"].pop("data_points")
    }
    return {"instrument": described, "points": points}


@tool(approval_mode="never_require")
async def lookup() -> str:
    """Finds something."""
    return "found"


async def run(middleware: ToolRateLimitMiddleware) -> None:
    """Three calls of which two are admitted, and one of a tool without a limit."""
    free = tool(lookup.func, name="free", approval_mode="never_require")
    asked: Turn = [
        ("c1", "lookup", {}),
        ("c2", "lookup", {}),
        ("c3", "lookup", {}),
        ("c4", "free", {}),
    ]
    client = OfflineChatClient(asked, "done")
    agent = Agent(client=client, tools=[lookup, free], middleware=[middleware])
    await agent.run("go")


def main() -> None:
    """Runs it."""
    middleware = ToolRateLimitMiddleware({"lookup": ToolRateLimit(1, 2)}, clock=lambda: 0.0)
    asyncio.run(run(middleware))
    if sys.argv[1] == "last":
        set_provider()
    steps = [read()]

    middleware.limiter.try_acquire("lookup", cost=3)
    steps.append(read())

    # A limiter that is gone leaves its counts, and another one of that name goes on from there.
    del middleware
    gc.collect()
    steps.append(read())
    asyncio.run(run(ToolRateLimitMiddleware({"lookup": ToolRateLimit(1, 2)}, clock=lambda: 0.0)))
    steps.append(read())
    json.dump(steps, sys.stdout)


main()
