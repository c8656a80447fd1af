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


async def run(name: str, count: int) -> int:
    """Runs an agent that calls a tool so many times, and counts the calls that ran."""
    calls: Turn = [(f"c{number}", name, {}) for number in range(count)]
    client = OfflineChatClient(calls, "done")
    agent = Agent(client=client, tools=[lookup, busy], middleware=[LIMITER])
    await agent.run("go")
    found = [
        content
        for message in client.requests[-1]
        for content in message.contents
        if content.type == "function_result"
    ]
    assert len(found) == count
    return sum("Rate limit exceeded" not in str(content.result) for content in found)


def main() -> None:
    """Runs it."""
    stop = threading.Event()
    runs = 0

    async def keep_busy() -> None:
        nonlocal runs
        while not stop.is_set():
            await run("busy", 3)
            runs += 1

    thread = threading.Thread(target=lambda: asyncio.run(keep_busy()))
    thread.start()
    before = asyncio.run(run("lookup", 1))
    children = [forked(lambda: str(asyncio.run(run("lookup", 4))), DEADLINE) for _ in range(20)]
    seen = runs
    while runs == seen:
        time.sleep(0.001)
    stop.set()
    thread.join()
    left = asyncio.run(run("lookup", 4))
    json.dump({"before": before, "children": children, "parent": left}, sys.stdout)


if __name__ == "__main__":
    main()
