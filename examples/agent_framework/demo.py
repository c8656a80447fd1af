"""Limits the tools of an agent.

The model asks for five calls at once: three of a tool that may run twice a second, two of one that
may run once a second. Two of them are rejected before the tool runs; a second later the buckets
have refilled and the same calls are admitted.

Runs offline, with a scripted model: python examples/agent_framework/demo.py
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Annotated

from agent_framework import Agent, AgentResponse, Content, tool
from offline import OfflineChatClient, Turn

from callgate.agent_framework import ToolRateLimit, ToolRateLimitMiddleware


@tool(approval_mode="never_require")
async def lookup_customer(name: Annotated[str, "The customer's name"]) -> str:
    """Looks a customer up in the CRM, which allows 2 requests a second."""
    return f"{name}: active since 2019"


@tool(approval_mode="never_require")
async def get_payment_status(invoice: Annotated[str, "The invoice's number"]) -> str:
    """Asks the payments API, which allows 1 request a second."""
    return f"{invoice}: paid"


def calls(turn: str) -> Turn:
    """What the model asks for in one turn."""
    return [
        (f"{turn}-1", "lookup_customer", {"name": "Ada"}),
        (f"{turn}-2", "lookup_customer", {"name": "Grace"}),
        (f"{turn}-3", "lookup_customer", {"name": "Edsger"}),
        (f"{turn}-4", "get_payment_status", {"invoice": "INV-7"}),
        (f"{turn}-5", "get_payment_status", {"invoice": "INV-8"}),
    ]


async def main() -> None:
    """Runs the agent twice, a second apart."""
    rate_limiter = ToolRateLimitMiddleware({
        "lookup_customer": ToolRateLimit(requests_per_second=2, burst=2),
        "get_payment_status": ToolRateLimit(requests_per_second=1, burst=1),
    })
    client = OfflineChatClient(calls("first"), "done", calls("second"), "done")
    agent = Agent(
        client=client,
        tools=[lookup_customer, get_payment_status],
        middleware=[rate_limiter],
    )

    print("The model asks for five calls in one turn.")
    show(await agent.run("How are our customers doing?"))
    print(f"  Of the third call the model reads: {told(client, 'first-3')}")

    print("\nA second later the buckets have refilled:")
    await asyncio.sleep(1)
    for name, snapshot in rate_limiter.limiter.snapshot().items():
        print(f"  {name}: {snapshot.remaining} of {snapshot.limit.burst} tokens")

    print("\nThe model asks again.")
    show(await agent.run("And now?"))


def show(response: AgentResponse) -> None:
    """Prints what became of each call, by its id."""
    for result in results(response):
        [item] = result.items or []
        rejection = item.additional_properties.get("rate_limit")
        if rejection is None:
            print(f"  {result.call_id:9} admitted  {item.text}")
        else:
            print(
                f"  {result.call_id:9} rejected  {rejection['tool']}: "
                f"retry after {math.ceil(rejection['retry_after'] * 1000) / 1000:.3f} s"
            )


def told(client: OfflineChatClient, call_id: str) -> str | None:
    """What the model was last sent as the result of a call."""
    for message in client.requests[-1]:
        for content in message.contents:
            if content.type == "function_result" and content.call_id == call_id:
                return str(content.result)
    return None


def results(response: AgentResponse) -> Sequence[Content]:
    """The results of the calls in a run."""
    return [
        content
        for message in response.messages
        for content in message.contents
        if content.type == "function_result"
    ]


if __name__ == "__main__":
    asyncio.run(main())
