"""Two tenants, one agent, and limits in a file.

Each tenant may look up 2 customers at once, and all together 5: limits.toml, beside this file, says
so. The application says whose run it is; the model has no say in that. Then the limits are tightened
while the agent lives: what was spent stays spent.

Runs offline, with a scripted model: python examples/agent_framework/tenants.py
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from agent_framework import Agent, tool
from offline import OfflineChatClient, Turn

from callgate import Limiter
from callgate.agent_framework import ToolRateLimitMiddleware

LIMITS = Path(__file__).with_name("limits.toml")


@tool(approval_mode="never_require")
async def lookup_customer(name: Annotated[str, "The customer's name"]) -> str:
    """Looks a customer up in the CRM, which all tenants share."""
    return f"{name}: active since 2019"


def calls(run: int) -> Turn:
    """What the model asks for in a run: three customers at once."""
    names = ["Ada", "Grace", "Edsger"]
    return [(f"{run}-{name}", "lookup_customer", {"name": name}) for name in names]


async def main() -> None:
    """Runs one agent for three tenants."""
    limiter = Limiter.from_file(LIMITS)
    agent = Agent(
        client=OfflineChatClient(*(turn for run in range(4) for turn in (calls(run), "done"))),
        tools=[lookup_customer],
        middleware=[ToolRateLimitMiddleware(limiter)],
    )

    print("Each tenant has a bucket of its own, of 2 tokens:")
    await ask(agent, "acme")
    await ask(agent, "umbrella")

    print("Now of 1. Nobody is given anything, and of the 5 that all share 1 is left:")
    tighten(limiter)
    await ask(agent, "acme")
    await ask(agent, "initech")


async def ask(agent: Agent, tenant: str) -> None:
    """Runs the agent for a tenant, and prints what became of the calls."""
    response = await agent.run(
        "Who are our customers?", function_invocation_kwargs={"tenant": tenant}
    )
    for message in response.messages:
        for result in message.contents:
            for item in (result.items or []) if result.type == "function_result" else []:
                rejection = item.additional_properties.get("rate_limit")
                by = f" (limit: {rejection['limit']})" if rejection else ""
                print(f"  {tenant:9} {item.text}{by}")


def tighten(limiter: Limiter) -> None:
    """What somebody does who changes the file: here to a copy of it."""
    with TemporaryDirectory() as folder:
        changed = Path(folder, "limits.toml")
        changed.write_text(LIMITS.read_text().replace("burst = 2", "burst = 1"))
        limiter.reload(changed)


if __name__ == "__main__":
    asyncio.run(main())
