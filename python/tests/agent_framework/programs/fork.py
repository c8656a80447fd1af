"""Forks twenty times while a thread with a loop of its own keeps an agent busy.

Each child runs an agent with the middleware that its parent made, and says what became of its
calls. The parent says whether it went on, and what was left for it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from typing import Any

from agent_framework import Agent, tool
from offline import OfflineChatClient, Turn

from callgate import ToolRateLimit
from callgate.agent_framework import ToolRateLimitMiddleware
from tests.running import forked

DEADLINE = 20.0
"""Seconds after which a child counts as hung; it answers within milliseconds."""

LIMITER = ToolRateLimitMiddleware({
    "busy": ToolRateLimit(1e9, 1),
    "lookup": ToolRateLimit.parse("1/h", 3),
})


@tool(approval_mode="never_require")
async def lookup() -> str:
    """Finds something."""
    return "found"


@tool(approval_mode="never_require")
async def busy() -> str:
    """Keeps busy."""
    return "done"


def agent_of(name: str, count: int, runs: int = 1) -> Agent[Any]:
    """An agent that calls a tool so many times in each of so many runs."""
    calls: Turn = [(f"c{number}", name, {}) for number in range(count)]
    client = OfflineChatClient(*[calls, "done"] * runs)
    return Agent(client=client, tools=[lookup, busy], middleware=[LIMITER])


async def run(agent: Agent[Any]) -> int:
    """Runs it, and counts the calls that ran."""
    response = await agent.run("go")
    found = [
        content
        for message in response.messages
        for content in message.contents
        if content.type == "function_result"
    ]
    assert found
    return sum("Rate limit exceeded" not in str(content.result) for content in found)


def main() -> None:
    """Runs it."""
    stop = threading.Event()
    runs = 0
    # Made before: whoever makes a client holds a lock of OpenTelemetry's, which a fork would take along.
    keeping_busy = agent_of("busy", 3, 50_000)

    async def keep_busy() -> None:
        nonlocal runs
        while not stop.is_set():
            await run(keeping_busy)
            runs += 1

    thread = threading.Thread(target=lambda: asyncio.run(keep_busy()))
    thread.start()
    before = asyncio.run(run(agent_of("lookup", 1)))

    def in_child() -> str:
        return str(asyncio.run(run(agent_of("lookup", 4))))

    children = [forked(in_child, DEADLINE) for _ in range(20)]
    seen = runs
    while runs == seen:
        time.sleep(0.001)
    stop.set()
    thread.join()
    left = asyncio.run(run(agent_of("lookup", 4)))
    json.dump({"before": before, "children": children, "parent": left}, sys.stdout)


if __name__ == "__main__":
    main()
