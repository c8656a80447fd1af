"""Two agents, one quota.

Both agents use the same CRM, which allows 2 requests a second however many agents ask. They share
one `Limiter`, each through a middleware of its own; what the one spends is gone for the other.

Runs offline, with scripted models: python examples/agent_framework/shared_limiter.py
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from agent_framework import Agent, tool
from offline import OfflineChatClient

from callgate import Limiter
from callgate.agent_framework import ToolRateLimit, ToolRateLimitMiddleware


@tool(approval_mode="never_require")
async def lookup_customer(name: Annotated[str, "The customer's name"]) -> str:
    """Looks a customer up in the CRM, which allows 2 requests a second."""
    return f"{name}: active since 2019"


def agent(name: str, limiter: Limiter) -> Agent:
    """An agent whose model looks up two customers at once."""
    calls = [
        (f"{name}-1", "lookup_customer", {"name": "Ada"}),
        (f"{name}-2", "lookup_customer", {"name": "Grace"}),
    ]
    return Agent(
        client=OfflineChatClient(calls, "done"),
        name=name,
        tools=[lookup_customer],
        middleware=[ToolRateLimitMiddleware(limiter)],
    )


async def main() -> None:
    """Runs both agents at the same time."""
    limiter = Limiter({"lookup_customer": ToolRateLimit(requests_per_second=2, burst=2)})
    responses = await asyncio.gather(
        agent("sales", limiter).run("Who are our customers?"),
        agent("support", limiter).run("Who has open tickets?"),
    )
    for response in responses:
        for message in response.messages:
            for result in message.contents:
                if result.type == "function_result":
                    print(f"{result.call_id:9} {result.result}")


if __name__ == "__main__":
    asyncio.run(main())
