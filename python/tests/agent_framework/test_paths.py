"""The ways on which a call reaches its tool. On each, a rejected call's body never runs (R35)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import agent_framework
import pytest
from agent_framework import AgentResponse, MCPStdioTool, Message

from callgate import Limiter, RateLimitExceeded, ToolRateLimit
from callgate.agent_framework import ToolRateLimitMiddleware
from tests.agent_framework.scripted import (
    OfflineChatClient,
    Recorded,
    agent_of,
    assert_answered,
    both_ways,
    calls,
    last_results,
    limits,
    recorded,
    rejections,
    remaining,
    results,
    run,
)
from tests.clocks import FakeClock

CURRENT = hasattr(agent_framework, "MiddlewareFailure")
"""Whether this is agent-framework-core 1.15 or later."""

MESSAGE = "Rate limit exceeded for tool 'lookup'. Retry in 1 second."


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Where tools write a file for each call whose body runs."""
    folder = tmp_path / "started"
    folder.mkdir()
    return folder


def written(files: Path) -> set[str]:
    """The calls whose body ran."""
    return {file.name for file in files.iterdir()}


def writing(files: Path, **options: Any) -> Recorded:
    """A tool that writes a file."""
    return recorded(act=lambda call: (files / call).touch(), **options)


@both_ways
async def test_r35_run(files: Path, clock: FakeClock, *, stream: bool) -> None:
    limiter = ToolRateLimitMiddleware(limits(burst=2), clock=clock)
    client = OfflineChatClient(calls("lookup", 4), "done")
    response = await run(agent_of(client, writing(files), middleware=[limiter]), stream=stream)
    assert response.text == "done"
    assert len(written(files)) == 2
    assert set(rejections(last_results(client))) == {"c1", "c2", "c3", "c4"} - written(files)


# --- approval ------------------------------------------------------------------------------------


def answer(response: AgentResponse[Any], approved: dict[str, bool]) -> Message:
    """The user's answers to the approvals that a run paused for, by the ids of the calls."""
    requests = {
        request.function_call.call_id: request
        for request in response.user_input_requests
        if request.function_call is not None
    }
    assert list(requests) == list(approved)
    return Message(
        role="user",
        contents=[
            requests[call].to_function_approval_response(said) for call, said in approved.items()
        ],
    )


@both_ways
async def test_r35_a_run_resumed_with_an_approval_is_charged_once_and_at_execution(
    files: Path, clock: FakeClock, *, stream: bool
) -> None:
    limiter = ToolRateLimitMiddleware(limits(burst=2), clock=clock)
    client = OfflineChatClient(calls("lookup", 3), "done")
    lookup = writing(files, approval_mode="always_require")
    agent = agent_of(client, lookup, middleware=[limiter])
    session = agent.create_session()

    paused = await run(agent, stream=stream, session=session)
    assert written(files) == set()
    assert remaining(limiter) == 2

    approval = answer(paused, {"c1": True, "c2": True, "c3": True})
    response = await run(agent, approval, stream=stream, session=session)
    assert response.text == "done"
    assert len(written(files)) == 2
    assert remaining(limiter) == 0
    found = last_results(client)
    assert set(found) == {"c1", "c2", "c3"}
    (rejected,) = rejections(found)
    assert rejected not in written(files)
    assert found[rejected].result == MESSAGE
    assert_answered(client.requests[-1])


@both_ways
async def test_r35_a_denied_approval_is_not_charged(
    files: Path, clock: FakeClock, *, stream: bool
) -> None:
    limiter = ToolRateLimitMiddleware(limits(burst=2), clock=clock)
    client = OfflineChatClient(calls("lookup", 3), "done")
    lookup = writing(files, approval_mode="always_require")
    agent = agent_of(client, lookup, middleware=[limiter])
    session = agent.create_session()

    paused = await run(agent, stream=stream, session=session)
    denial = answer(paused, {"c1": False, "c2": True, "c3": False})
    response = await run(agent, denial, stream=stream, session=session)
    assert response.text == "done"
    assert written(files) == {"c2"}
    assert remaining(limiter) == 1
    assert rejections(last_results(client)) == {}
    assert_answered(client.requests[-1])


@both_ways
async def test_r35_an_approval_that_comes_while_the_bucket_is_empty_is_rejected(
    files: Path, clock: FakeClock, *, stream: bool
) -> None:
    limiter = ToolRateLimitMiddleware(limits(burst=1), clock=clock)
    client = OfflineChatClient(calls("lookup", 1), "too early", calls("lookup", 1, "d"), "done")
    lookup = writing(files, approval_mode="always_require")
    agent = agent_of(client, lookup, middleware=[limiter])
    session = agent.create_session()

    paused = await run(agent, stream=stream, session=session)
    assert limiter.limiter.try_acquire("lookup")
    response = await run(agent, answer(paused, {"c1": True}), stream=stream, session=session)
    assert response.text == "too early"
    assert written(files) == set()
    assert last_results(client)["c1"].result == MESSAGE

    # The model asks again, and is approved again, when the bucket has refilled.
    paused = await run(agent, "again", stream=stream, session=session)
    clock.advance(1)
    response = await run(agent, answer(paused, {"d1": True}), stream=stream, session=session)
    assert response.text == "done"
    assert written(files) == {"d1"}
    assert_answered(client.requests[-1])


@pytest.mark.skipif(not CURRENT, reason="needs agent-framework-core 1.15 or later")
@both_ways
async def test_r35_raise_ends_a_run_that_is_resumed_with_an_approval(
    files: Path, clock: FakeClock, *, stream: bool
) -> None:
    limiter = ToolRateLimitMiddleware(limits(), on_rejected="raise", clock=clock)
    client = OfflineChatClient(calls("lookup", 2), "never said")
    lookup = writing(files, approval_mode="always_require")
    agent = agent_of(client, lookup, middleware=[limiter])
    session = agent.create_session()

    paused = await run(agent, stream=stream, session=session)
    approval = answer(paused, {"c1": True, "c2": True})
    with pytest.raises(agent_framework.MiddlewareFailure) as failed:
        await run(agent, approval, stream=stream, session=session)
    assert isinstance(failed.value.__cause__, RateLimitExceeded)
    assert written(files) == {"c1"}
    assert len(client.requests) == 1


@both_ways
async def test_r35_terminate_keeps_the_tool_from_running_in_a_resumed_run_too(
    files: Path, clock: FakeClock, *, stream: bool
) -> None:
    limiter = ToolRateLimitMiddleware(limits(), on_rejected="terminate", clock=clock)
    client = OfflineChatClient(calls("lookup", 2), "asked once more")
    lookup = writing(files, approval_mode="always_require")
    agent = agent_of(client, lookup, middleware=[limiter])
    session = agent.create_session()

    paused = await run(agent, stream=stream, session=session)
    approval = answer(paused, {"c1": True, "c2": True})
    response = await run(agent, approval, stream=stream, session=session)
    assert written(files) == {"c1"}
    if CURRENT:
        assert len(client.requests) == 1
        assert results(response.messages)["c2"].result == MESSAGE
    else:
        # 1.0.0 does not heed a termination there: the model reads the results and goes on.
        assert response.text == "asked once more"
        assert last_results(client)["c2"].result == MESSAGE


# --- agents as tools -----------------------------------------------------------------------------


@both_ways
async def test_r35_an_agent_used_as_a_tool_is_limited_and_limits_within(
    files: Path, clock: FakeClock, *, stream: bool
) -> None:
    limiter = Limiter(
        {"ask_researcher": ToolRateLimit(1, 2), "lookup": ToolRateLimit(1, 3)}, clock=clock
    )
    inner_client = OfflineChatClient(
        *(calls("lookup", 2, "first"), "half"), *(calls("lookup", 2, "second"), "rest")
    )
    researcher = agent_of(
        inner_client, writing(files), middleware=[ToolRateLimitMiddleware(limiter)]
    )
    asking = [(f"c{n}", "ask_researcher", {"task": "find it"}) for n in (1, 2, 3)]
    client = OfflineChatClient([asking[0]], [asking[1]], [asking[2]], "done")
    agent = agent_of(
        client,
        researcher.as_tool(name="ask_researcher"),
        middleware=[ToolRateLimitMiddleware(limiter)],
    )
    response = await run(agent, stream=stream)

    assert response.text == "done"
    found = last_results(client)
    assert [found[call].result for call in ("c1", "c2")] == ["half", "rest"]
    assert set(rejections(found)) == {"c3"}
    assert len(inner_client.requests) == 4
    # Within: two lookups of the first task, and one of the second.
    assert len(written(files)) == 3
    assert {"first1", "first2"} < written(files)
    assert len(rejections(last_results(inner_client))) == 1
    assert_answered(client.requests[-1])


async def test_an_agent_used_as_a_tool_is_not_limited_within_by_the_outer_agents_middleware(
    clock: FakeClock,
) -> None:
    lookup = recorded()
    researcher = agent_of(OfflineChatClient(calls("lookup", 3), "found"), lookup)
    limiter = ToolRateLimitMiddleware(limits(), clock=clock)
    client = OfflineChatClient([("c1", "ask_researcher", {"task": "find it"})], "done")
    agent = agent_of(client, researcher.as_tool(name="ask_researcher"), middleware=[limiter])
    await run(agent)
    # Middleware belongs to the agent that it is registered on: register it on both.
    assert len(lookup.started) == 3
    assert remaining(limiter) == 1


@pytest.mark.skipif(not CURRENT, reason="needs agent-framework-core 1.15 or later")
@both_ways
async def test_r35_raise_within_an_agent_used_as_a_tool_ends_the_outer_run(
    files: Path, clock: FakeClock, *, stream: bool
) -> None:
    limiter = ToolRateLimitMiddleware(limits(), on_rejected="raise", clock=clock)
    inner_client = OfflineChatClient(calls("lookup", 2), "never said")
    researcher = agent_of(inner_client, writing(files), middleware=[limiter])
    client = OfflineChatClient([("c1", "ask_researcher", {"task": "find it"})], "never said")
    agent = agent_of(client, researcher.as_tool(name="ask_researcher"))
    with pytest.raises(agent_framework.MiddlewareFailure) as failed:
        await run(agent, stream=stream)
    assert isinstance(failed.value.__cause__, RateLimitExceeded)
    assert written(files) == {"c1"}


async def test_terminate_within_an_agent_used_as_a_tool_leaves_the_outer_model_no_text(
    files: Path, clock: FakeClock
) -> None:
    limiter = ToolRateLimitMiddleware(limits(), on_rejected="terminate", clock=clock)
    inner_client = OfflineChatClient(calls("lookup", 2), "never said")
    researcher = agent_of(inner_client, writing(files), middleware=[limiter])
    client = OfflineChatClient([("c1", "ask_researcher", {"task": "find it"})], "done")
    response = await run(agent_of(client, researcher.as_tool(name="ask_researcher")))
    assert response.text == "done"
    assert written(files) == {"c1"}
    # An agent's answer as a tool is its text, and a loop that was ended has none: use "result".
    assert last_results(client)["c1"].result == ""


# --- MCP -----------------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("prefix", [None, "crm"])
async def test_r35_tools_of_an_mcp_server_are_limited_by_the_name_that_the_model_sees(
    prefix: str | None, files: Path, clock: FakeClock, *, stream: bool
) -> None:
    name = "lookup" if prefix is None else f"{prefix}_lookup"
    limiter = ToolRateLimitMiddleware(limits(burst=2, tool=name), clock=clock)
    server = Path(__file__).with_name("mcp_server.py")
    async with MCPStdioTool(
        name="files",
        command=sys.executable,
        args=[str(server), str(files)],
        tool_name_prefix=prefix,
        load_prompts=False,
        approval_mode="never_require",
    ) as tools:
        assert [tool.name for tool in tools.functions] == [name]
        client = OfflineChatClient(calls(name, 4), "done", calls(name, 1, "d"), "done")
        agent = agent_of(client, *tools.functions, middleware=[limiter])
        response = await run(agent, stream=stream)
        assert response.text == "done"
        assert len(written(files)) == 2
        found = last_results(client)
        assert set(rejections(found)) == {"c1", "c2", "c3", "c4"} - written(files)
        for call in written(files):
            assert "rate_limit" not in str(found[call].items)
            assert f"lookup found {call}" in str(found[call].result)
        assert_answered(client.requests[-1])

        clock.advance(1)
        await run(agent, stream=stream)
        assert "d1" in written(files)


async def test_an_mcp_tool_given_as_a_whole_is_limited_too(files: Path, clock: FakeClock) -> None:
    limiter = ToolRateLimitMiddleware(limits(burst=1), clock=clock)
    server = Path(__file__).with_name("mcp_server.py")
    client = OfflineChatClient(calls("lookup", 2), "done")
    async with MCPStdioTool(
        name="files",
        command=sys.executable,
        args=[str(server), str(files)],
        load_prompts=False,
        approval_mode="never_require",
    ) as tools:
        response = await run(agent_of(client, middleware=[limiter]), tools=tools)
    assert response.text == "done"
    assert len(written(files)) == 1
    assert len(rejections(last_results(client))) == 1


# --- what is not covered -------------------------------------------------------------------------


async def test_a_tool_invoked_directly_bypasses_middleware_and_so_the_limit(
    clock: FakeClock,
) -> None:
    # The framework runs middleware in the agent's tool loop only. Whoever invokes a tool's body
    # by hand asks a `Limiter` by hand.
    lookup = recorded()
    limiter = ToolRateLimitMiddleware(limits(), clock=clock)
    client = OfflineChatClient(calls("lookup", 1), "done")
    await run(agent_of(client, lookup, middleware=[limiter]))
    assert remaining(limiter) == 0

    await lookup.tool.invoke(arguments={"call": "by hand"})
    assert lookup.started == ["c1", "by hand"]
