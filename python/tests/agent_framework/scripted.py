"""Agents of the real framework whose model plays a script, and ways to look at what became of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from agent_framework import (
    Agent,
    AgentResponse,
    AgentSession,
    Content,
    FunctionTool,
    Message,
    tool,
)
from offline import OfflineChatClient

from callgate.agent_framework import ToolRateLimit, ToolRateLimitMiddleware

__all__ = [
    "OfflineChatClient",
    "Recorded",
    "agent_of",
    "assert_answered",
    "both_ways",
    "calls",
    "last_results",
    "limits",
    "recorded",
    "rejections",
    "remaining",
    "results",
    "run",
]


both_ways = pytest.mark.parametrize("stream", [False, True], ids=["run", "stream"])
"""A test of `Agent.run`, streaming and not."""


@dataclass
class Recorded:
    """A tool that notes which calls reached its body."""

    tool: FunctionTool
    started: list[str] = field(default_factory=list)


def recorded(
    name: str = "lookup",
    act: Callable[[str], Any] | None = None,
    *,
    sync: bool = False,
    approval_mode: Literal["always_require", "never_require"] = "never_require",
) -> Recorded:
    """Makes a tool that takes the id of its call, and answers that it found it.

    Args:
        name: Its name.
        act: What it does on the way, plain or async.
        sync: Whether it is a plain function.
        approval_mode: As in the framework.
    """
    started: list[str] = []

    async def find(call: str) -> str:
        """Finds something."""
        started.append(call)
        if act is not None:
            done = act(call)
            if inspect.isawaitable(done):
                await done
        return f"{name} found {call}"

    def find_sync(call: str) -> str:
        """Finds something."""
        started.append(call)
        if act is not None:
            act(call)
        return f"{name} found {call}"

    body: Callable[..., Any] = find_sync if sync else find
    return Recorded(tool(body, name=name, approval_mode=approval_mode), started)


def calls(name: str, count: int, prefix: str = "c") -> list[tuple[str, str, Mapping[str, Any]]]:
    """A turn in which the model asks for one tool many times at once, with the ids c1, c2, ..."""
    return [(f"{prefix}{n}", name, {"call": f"{prefix}{n}"}) for n in range(1, count + 1)]


def agent_of(
    client: OfflineChatClient, *tools: Recorded | FunctionTool, middleware: Sequence[Any] = ()
) -> Agent[Any]:
    """An agent with these tools."""
    found = [given.tool if isinstance(given, Recorded) else given for given in tools]
    return Agent(client=client, name="tester", tools=found, middleware=list(middleware))


async def run(
    agent: Agent[Any],
    messages: str | Message = "go",
    *,
    stream: bool = False,
    session: AgentSession | None = None,
    **options: Any,
) -> AgentResponse[Any]:
    """Runs an agent to the end, streaming or not."""
    response: AgentResponse[Any]
    if stream:
        updates = agent.run(messages, stream=True, session=session, **options)
        async for _ in updates:
            pass
        response = await updates.get_final_response()
    else:
        response = await agent.run(messages, session=session, **options)
    return response


def results(messages: Sequence[Message]) -> dict[str, Content]:
    """The results of calls by their ids, of which none has two."""
    found: dict[str, Content] = {}
    for message in messages:
        for content in message.contents:
            if content.type == "function_result":
                assert content.call_id is not None
                assert content.call_id not in found, f"{content.call_id} has two results"
                found[content.call_id] = content
    return found


def last_results(client: OfflineChatClient) -> dict[str, Content]:
    """The results in the model's latest request."""
    return results(client.requests[-1])


def rejections(found: Mapping[str, Content]) -> dict[str, dict[str, Any]]:
    """What programs read of each call that was rejected, by its id."""
    return {
        call_id: item.additional_properties["rate_limit"]
        for call_id, content in found.items()
        for item in content.items or []
        if "rate_limit" in item.additional_properties
    }


def assert_answered(messages: Sequence[Message]) -> None:
    """Checks a request as a provider does: each call is answered once, and nothing else is."""
    waiting: set[str | None] = set()
    seen: set[str | None] = set()
    for message in messages:
        for content in message.contents:
            if content.type == "function_call":
                assert content.call_id not in seen
                waiting.add(content.call_id)
                seen.add(content.call_id)
            elif content.type == "function_result":
                assert content.call_id in waiting
                waiting.remove(content.call_id)
    assert not waiting


def limits(rate: float = 1, burst: int = 1, tool: str = "lookup") -> dict[str, ToolRateLimit]:
    """The limit of one tool."""
    return {tool: ToolRateLimit(rate, burst)}


def remaining(middleware: ToolRateLimitMiddleware, tool: str = "lookup") -> int | None:
    """The whole tokens in a tool's bucket."""
    return middleware.limiter.snapshot()[tool].remaining
