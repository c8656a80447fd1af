"""Whose call it is and what it costs: the fields and the cost of an agent's calls."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import UUID

import pytest
from agent_framework import AgentResponse, FunctionInvocationContext, MCPStdioTool, Message

from callgate import ConfigError, Limiter, ToolRateLimit
from callgate import agent_framework as front_end
from callgate.agent_framework import ToolRateLimitMiddleware
from tests.agent_framework.scripted import (
    OfflineChatClient,
    agent_of,
    assert_answered,
    both_ways,
    calls,
    last_results,
    limits,
    recorded,
    rejections,
    remaining,
    run,
)
from tests.clocks import FakeClock

Context = FunctionInvocationContext


def hourly(burst: int, **options: Any) -> ToolRateLimit:
    """A limit that refills too slowly to matter."""
    return ToolRateLimit.parse("1/h", burst, **options)


def per(*fields: str, burst: int = 2) -> dict[str, ToolRateLimit]:
    """The limit of one tool, split by fields."""
    return {"lookup": hourly(burst, per=fields)}


def turns(count: int, *prefixes: str) -> OfflineChatClient:
    """A model that asks for so many calls in one turn of each run."""
    said = [turn for prefix in prefixes for turn in (calls("lookup", count, prefix), "done")]
    return OfflineChatClient(*said)


# --- fields by default ---------------------------------------------------------------------------


@both_ways
async def test_two_tenants_of_one_agent_have_a_quota_each(
    clock: FakeClock, *, stream: bool
) -> None:
    limiter = ToolRateLimitMiddleware(per("tenant"), clock=clock)
    lookup = recorded()
    client = turns(3, "a", "u", "b", "n")
    agent = agent_of(client, lookup, middleware=[limiter])
    for tenant in ("acme", "umbrella", "acme", None):
        kwargs: dict[str, Any] = {"tenant": tenant, "other": object()}
        response = await run(agent, stream=stream, function_invocation_kwargs=kwargs)
        assert response.text == "done"
        assert_answered(client.requests[-1])
    assert lookup.started == ["a1", "a2", "u1", "u2", "n1", "n2"]
    assert limiter.limiter.snapshot()["lookup"].buckets == 3


async def test_runs_of_two_tenants_at_the_same_time_are_told_apart(clock: FakeClock) -> None:
    limiter = ToolRateLimitMiddleware(per("tenant"), clock=clock)
    lookup = recorded(act=lambda _call: asyncio.sleep(0))
    tenants = ["acme", "umbrella", "initech"]

    async def request(tenant: str) -> None:
        agent = agent_of(turns(4, tenant), lookup, middleware=[limiter])
        await run(agent, function_invocation_kwargs={"tenant": tenant})

    await asyncio.gather(*map(request, tenants))
    assert sorted(lookup.started) == sorted(f"{tenant}{n}" for tenant in tenants for n in (1, 2))


async def test_the_model_cannot_choose_its_tenant(clock: FakeClock) -> None:
    limiter = ToolRateLimitMiddleware(per("tenant"), clock=clock)
    lookup = recorded()
    asked = [(f"c{n}", "lookup", {"call": f"c{n}", "tenant": f"other {n}"}) for n in range(4)]
    agent = agent_of(OfflineChatClient(asked, "done"), lookup, middleware=[limiter])
    await run(agent, function_invocation_kwargs={"tenant": "acme"})
    assert limiter.limiter.snapshot()["lookup"].buckets == 1
    assert not limiter.limiter.try_acquire("lookup", tenant="acme")
    assert len(lookup.started) == 2


@both_ways
async def test_each_session_has_a_quota_of_its_own(clock: FakeClock, *, stream: bool) -> None:
    limiter = ToolRateLimitMiddleware(per("session"), clock=clock)
    lookup = recorded()
    agent = agent_of(turns(3, "a", "b", "c", "n", "m"), lookup, middleware=[limiter])
    first, second = agent.create_session(session_id="1"), agent.create_session(session_id="2")
    for session in (first, second, first, None, None):
        await run(agent, stream=stream, session=session)
    # A run that is given no session gets one of its own from the framework.
    assert lookup.started == ["a1", "a2", "b1", "b2", "n1", "n2", "m1", "m2"]
    assert not limiter.limiter.try_acquire("lookup", session="1")
    assert limiter.limiter.snapshot()["lookup"].buckets == 4


@pytest.mark.parametrize("tenant", [True, 1.5, b"acme", object(), ["acme"]], ids=ascii)
async def test_a_tenant_that_is_no_name_keeps_the_tool_from_running(
    tenant: Any, clock: FakeClock
) -> None:
    limiter = ToolRateLimitMiddleware(per("tenant"), clock=clock)
    lookup = recorded()
    client = turns(2, "c")
    response = await run(
        agent_of(client, lookup, middleware=[limiter]),
        function_invocation_kwargs={"tenant": tenant},
    )
    assert response.text == "done"
    assert lookup.started == []
    # The model reads what it reads of any middleware that fails.
    assert {content.result for content in last_results(client).values()} == {
        "Error: Function failed."
    }
    assert limiter.limiter.snapshot()["lookup"].buckets == 0


# --- what is logged ------------------------------------------------------------------------------


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """The level and the text of what callgate logged."""
    records = [record for record in caplog.records if record.name == "callgate"]
    return [(record.levelname, record.getMessage()) for record in records]


@both_ways
async def test_why_a_value_keeps_the_tool_from_running_is_logged(
    clock: FakeClock, caplog: pytest.LogCaptureFixture, *, stream: bool
) -> None:
    tenant = UUID(int=7)
    limiter = ToolRateLimitMiddleware(per("tenant"), clock=clock)
    lookup = recorded()
    agent = agent_of(turns(1, "c"), lookup, middleware=[limiter])
    await run(agent, stream=stream, function_invocation_kwargs={"tenant": tenant})
    assert lookup.started == []
    assert logged(caplog) == [
        (
            "ERROR",
            (
                "A call of tool 'lookup' was not decided on, and not run: tool 'lookup': field 'tenant' "
                f"must be a str (of valid Unicode), an int or None, got {tenant!r}"
            ),
        )
    ]
    assert [record.exc_info for record in caplog.records if record.name == "callgate"] == [None]


@pytest.mark.parametrize("failing", ["fields", "cost"])
async def test_what_a_callable_raises_is_logged_with_its_traceback(
    failing: str, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_arguments: Any) -> Any:
        raise LookupError("broken")

    given: dict[str, Any] = {"clock": clock, failing: fail}
    limiter = ToolRateLimitMiddleware(per("tenant"), **given)
    lookup = recorded()
    await run(agent_of(turns(1, "c"), lookup, middleware=[limiter]))
    assert lookup.started == []
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    [error] = [record for record in errors if record.name == "callgate"]
    assert error.getMessage() == "A call of tool 'lookup' was not decided on, and not run: broken"
    assert error.exc_info is not None
    assert error.exc_info[0] is LookupError


@pytest.fixture
def _nothing_was_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_end, "_warned", set())


@pytest.mark.usefixtures("_nothing_was_warned_of")
@pytest.mark.parametrize("given", [None, {}, {"tenant": None}, {"tennant": "acme"}], ids=repr)
@both_ways
async def test_that_calls_lack_a_tenant_is_logged_once_for_all_middleware(
    given: dict[str, Any] | None,
    clock: FakeClock,
    caplog: pytest.LogCaptureFixture,
    *,
    stream: bool,
) -> None:
    for _ in range(2):
        limiter = ToolRateLimitMiddleware(per("tenant"), clock=clock)
        agent = agent_of(turns(3, "a", "b"), recorded(), middleware=[limiter])
        for _ in range(2):
            await run(agent, stream=stream, function_invocation_kwargs=given)
    assert logged(caplog) == [
        (
            "WARNING",
            (
                "Tool 'lookup' is called without 'tenant', which a limit is split by: all such calls share "
                "one bucket. The field is looked for in the run's function_invocation_kwargs."
            ),
        )
    ]


@pytest.mark.usefixtures("_nothing_was_warned_of")
async def test_each_tool_and_each_field_that_is_missing_is_logged_and_no_other(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    limiting = {
        "lookup": hourly(9, per=["tenant", "user", "tool"]),
        "pay": hourly(9, per="tenant"),
        "plain": hourly(9),
    }
    limiter = ToolRateLimitMiddleware(limiting, clock=clock)
    names = ["lookup", "pay", "plain", "free"]
    turn = [call for name in names for call in calls(name, 2, name)]
    tools = [recorded(name) for name in names]
    agent = agent_of(OfflineChatClient(turn, "done", turn, "done"), *tools, middleware=[limiter])
    await run(agent, function_invocation_kwargs={"tenant": "acme", "user": 0})
    assert logged(caplog) == []
    await run(agent)
    warned = [tuple(text.split("'")[1:4:2]) for _level, text in logged(caplog)]
    assert warned == [("lookup", "tenant"), ("lookup", "user"), ("pay", "tenant")]


@pytest.mark.usefixtures("_nothing_was_warned_of")
@pytest.mark.parametrize("kind", [dict, MappingProxyType])
async def test_a_field_that_a_callable_leaves_out_is_logged_with_where_it_was_looked_for(
    kind: Any, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = ToolRateLimitMiddleware(
        per("tenant", "user"),
        fields=lambda _context: kind({"user": None, "tenant": 5}),
        clock=clock,
    )
    await run(agent_of(turns(3, "c"), recorded(), middleware=[limiter]))
    [(level, text)] = logged(caplog)
    assert level == "WARNING"
    assert text.startswith("Tool 'lookup' is called without 'user'")
    assert text.endswith("looked for in what `fields` returns.")


@pytest.mark.usefixtures("_nothing_was_warned_of")
async def test_a_call_without_a_session_is_logged(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = ToolRateLimitMiddleware(per("session"), clock=clock)
    lookup = recorded().tool

    async def call_next() -> None:
        pass

    for _ in range(2):
        # As from a chat client that is used without an agent.
        await limiter.process(Context(lookup, arguments={}), call_next)
    [(level, text)] = logged(caplog)
    assert level == "WARNING"
    assert text.endswith("looked for in the run's session.")


@pytest.mark.usefixtures("_nothing_was_warned_of")
async def test_what_was_warned_of_is_remembered_for_so_many_tools_only(
    clock: FakeClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_end, "_MOST_WARNINGS", 3)
    limiter = ToolRateLimitMiddleware({"*": hourly(99, per="tenant")}, clock=clock)
    tools = [recorded(f"tool_{number}") for number in range(5)]
    turn = [call for tool in tools for call in calls(tool.tool.name, 1, tool.tool.name)]
    await run(agent_of(OfflineChatClient(turn, "done"), *tools, middleware=[limiter]))
    assert len(logged(caplog)) == len(front_end._warned) == 3


# --- fields by a callable ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [dict, MappingProxyType])
async def test_fields_may_be_found_by_a_callable(kind: Any, clock: FakeClock) -> None:
    def fields(context: Context) -> Mapping[str, str | int | None]:
        found: Mapping[str, str | int | None] = kind({
            "tenant": context.kwargs["headers"]["x-tenant"],
            "unused": 5,
        })
        return found

    limiter = ToolRateLimitMiddleware(per("tenant"), fields=fields, clock=clock)
    lookup = recorded()
    agent = agent_of(turns(3, "a", "u"), lookup, middleware=[limiter])
    for tenant in ("acme", 7):
        kwargs = {"headers": {"x-tenant": tenant}, "tenant": "not this one"}
        await run(agent, function_invocation_kwargs=kwargs)
    assert lookup.started == ["a1", "a2", "u1", "u2"]
    assert not limiter.limiter.try_acquire("lookup", tenant="7")


async def test_fields_are_asked_for_once_a_call_and_only_where_a_limit_needs_them(
    clock: FakeClock,
) -> None:
    asked: list[str] = []

    def fields(context: Context) -> dict[str, str]:
        asked.append(context.function.name)
        return {"tenant": "acme"}

    limiting = {**per("tenant"), "plain": hourly(9)}
    limiter = ToolRateLimitMiddleware(limiting, fields=fields, clock=clock)
    turn = [*calls("lookup", 3, "l"), *calls("plain", 3, "p"), *calls("free", 3, "f")]
    tools = [recorded(name) for name in ("lookup", "plain", "free")]
    await run(agent_of(OfflineChatClient(turn, "done"), *tools, middleware=[limiter]))
    assert asked == ["lookup"] * 3


@pytest.mark.parametrize(
    "found",
    [None, "tenant", 5, [("tenant", "acme")], {"tenant": 1.5}, {1: "acme"}, LookupError("broken")],
    ids=ascii,
)
@both_ways
async def test_r35_wrong_fields_keep_the_tool_from_running_and_spend_nothing(
    found: Any, clock: FakeClock, *, stream: bool
) -> None:
    def fields(_context: Context) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    limiting = {**per("tenant"), "all": hourly(9, tools="*")}
    limiter = ToolRateLimitMiddleware(limiting, fields=fields, clock=clock)
    lookup = recorded()
    client = turns(2, "c")
    response = await run(agent_of(client, lookup, middleware=[limiter]), stream=stream)
    assert response.text == "done"
    assert lookup.started == []
    assert remaining(limiter, "all") == 9
    results = last_results(client)
    assert set(results) == {"c1", "c2"}
    assert "broken" not in str([content.result for content in results.values()])


@pytest.mark.parametrize("name", ["fields", "cost"])
def test_a_coroutine_function_is_refused_since_nobody_would_wait_for_it(name: str) -> None:
    async def later(_context: Context) -> Any:
        return None

    given: Any
    for given in (later, partial(later)):
        make: Any = partial(ToolRateLimitMiddleware, limits(), **{name: given})
        with pytest.raises(ConfigError) as refused:
            make()
        assert str(refused.value) == (
            f"{name} must be a plain function, since a decision waits for nothing, got {given!r}"
        )


# --- cost ----------------------------------------------------------------------------------------


async def test_a_call_costs_what_the_callable_says_or_else_what_the_limit_says(
    clock: FakeClock,
) -> None:
    def cost(context: Context) -> int | None:
        arguments: Any = context.arguments
        return {"c1": 5, "c2": None, "c3": 4, "c4": 1}[arguments["call"]]

    limiting = {"lookup": hourly(9, cost=2)}
    limiter = ToolRateLimitMiddleware(limiting, cost=cost, clock=clock)
    lookup = recorded()
    client = OfflineChatClient(*([call] for call in calls("lookup", 4)), "done")
    await run(agent_of(client, lookup, middleware=[limiter]))
    assert lookup.started == ["c1", "c2", "c4"]
    assert remaining(limiter) == 1
    assert rejections(last_results(client))["c3"]["remaining"] == 2


@pytest.mark.parametrize(
    "found", [0, -1, 1.0, True, "1", float("nan"), LookupError("broken")], ids=ascii
)
async def test_r04_r35_a_wrong_cost_keeps_the_tool_from_running_and_spends_nothing(
    found: Any, clock: FakeClock
) -> None:
    def cost(_context: Context) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    limiter = ToolRateLimitMiddleware(limits(burst=3), cost=cost, clock=clock)
    lookup, free = recorded(), recorded("free")
    client = OfflineChatClient([*calls("lookup", 2), *calls("free", 1, "f")], "done")
    response = await run(agent_of(client, lookup, free, middleware=[limiter]))
    assert response.text == "done"
    assert lookup.started == free.started == []
    assert remaining(limiter) == 3


async def test_r05_a_call_that_costs_more_than_the_burst_is_told_never_to_retry(
    clock: FakeClock,
) -> None:
    limiter = ToolRateLimitMiddleware(limits(burst=3), cost=lambda _context: 4, clock=clock)
    client = turns(1, "c")
    await run(agent_of(client, recorded(), middleware=[limiter]))
    assert rejections(last_results(client))["c1"] == {
        "tool": "lookup",
        "limit": "lookup",
        "reason": "cost",
        "remaining": 3,
        "retry_after": None,
    }
    assert "do not retry" in last_results(client)["c1"].result


# --- on other paths ------------------------------------------------------------------------------


def approval(response: AgentResponse[Any]) -> Message:
    """The user's consent to all that a run paused for."""
    return Message(
        role="user",
        contents=[
            request.to_function_approval_response(True) for request in response.user_input_requests
        ],
    )


@both_ways
async def test_a_resumed_run_is_of_the_tenant_that_it_is_resumed_for(
    clock: FakeClock, *, stream: bool
) -> None:
    # An approval is a run of its own: what was passed to the run that paused is gone by then.
    limiter = ToolRateLimitMiddleware(per("tenant"), clock=clock)
    lookup = recorded(approval_mode="always_require")
    agent = agent_of(turns(3, "a", "u"), lookup, middleware=[limiter])
    for tenant in ("acme", "umbrella"):
        session = agent.create_session()
        kwargs = {"tenant": tenant}
        paused = await run(agent, stream=stream, session=session, function_invocation_kwargs=kwargs)
        await run(
            agent,
            approval(paused),
            stream=stream,
            session=session,
            function_invocation_kwargs=kwargs,
        )
    assert sorted(lookup.started) == ["a1", "a2", "u1", "u2"]
    assert not limiter.limiter.try_acquire("lookup", tenant="acme")


@both_ways
async def test_an_agent_used_as_a_tool_passes_what_its_tools_are_passed(
    clock: FakeClock, *, stream: bool
) -> None:
    limiter = Limiter(per("tenant", burst=3), clock=clock)
    lookup = recorded()
    inner = turns(2, "a", "b", "u")
    middleware = [ToolRateLimitMiddleware(limiter)]
    researcher = agent_of(inner, lookup, middleware=middleware)
    asking = [("c1", "ask_researcher", {"task": "find it"})]
    client = OfflineChatClient(asking, "done", asking, "done", asking, "done")
    agent = agent_of(client, researcher.as_tool(name="ask_researcher"), middleware=middleware)
    for tenant in ("acme", "acme", "umbrella"):
        await run(agent, stream=stream, function_invocation_kwargs={"tenant": tenant})
    assert lookup.started == ["a1", "a2", "b1", "u1", "u2"]
    assert limiter.snapshot()["lookup"].buckets == 2


async def test_an_agent_used_as_a_tool_has_its_callers_session_where_that_is_propagated(
    clock: FakeClock,
) -> None:
    for propagated in (False, True):
        limiter = ToolRateLimitMiddleware(per("session"), clock=clock)
        lookup = recorded()
        researcher = agent_of(turns(1, "c"), lookup, middleware=[limiter])
        asking = [("c1", "ask_researcher", {"task": "find it"})]
        tool = researcher.as_tool(name="ask_researcher", propagate_session=propagated)
        agent = agent_of(OfflineChatClient(asking, "done"), tool)
        session = agent.create_session(session_id="outer")
        await run(agent, session=session)
        assert lookup.started == ["c1"]
        level = limiter.limiter.try_acquire("lookup", session="outer").remaining
        assert level == (0 if propagated else 1)


def started_in(folder: Path) -> list[str]:
    """The first letters of the calls that ran."""
    return sorted(file.name[0] for file in folder.iterdir())


@both_ways
async def test_tools_of_an_mcp_server_are_limited_by_patterns_and_tenants(
    tmp_path: Path, clock: FakeClock, *, stream: bool
) -> None:
    limiting = {"crm_*": hourly(2, per=["tenant"]), "everything": hourly(5, tools=["*"])}
    limiter = ToolRateLimitMiddleware(limiting, clock=clock)
    server = Path(__file__).with_name("mcp_server.py")
    async with MCPStdioTool(
        name="files",
        command=sys.executable,
        args=[str(server), str(tmp_path)],
        tool_name_prefix="crm",
        load_prompts=False,
        approval_mode="never_require",
    ) as tools:
        said = [turn for name in ("a", "u", "b") for turn in (calls("crm_lookup", 3, name), "done")]
        client = OfflineChatClient(*said)
        agent = agent_of(client, *tools.functions, middleware=[limiter])
        for tenant in ("acme", "umbrella", None):
            kwargs = {"tenant": tenant}
            await run(agent, stream=stream, function_invocation_kwargs=kwargs)
    # Two of each tenant, and of those without one what is left for all.
    assert started_in(tmp_path) == ["a", "a", "b", "u", "u"]
    found = rejections(last_results(client)).values()
    assert sorted(rejected["limit"] for rejected in found) == ["everything", "everything"]


# --- several limits ------------------------------------------------------------------------------


@both_ways
async def test_r34_of_eight_calls_in_one_turn_as_many_run_as_all_limits_allow(
    clock: FakeClock, *, stream: bool
) -> None:
    limiting = {
        "lookup": hourly(6),
        "all": hourly(20, tools="*"),
        "tenants": hourly(7, tools="*", per="tenant"),
    }
    limiter = ToolRateLimitMiddleware(limiting, clock=clock)
    lookup = recorded()
    client = OfflineChatClient(calls("lookup", 8), "done", "a normal second turn")
    agent = agent_of(client, lookup, middleware=[limiter])
    session = agent.create_session()
    await run(agent, stream=stream, session=session)
    assert len(lookup.started) == 6
    found = last_results(client)
    assert list(found) == [f"c{n}" for n in range(1, 9)]
    refused = rejections(found)
    assert set(refused) == set(found) - set(lookup.started)
    assert {rejected["limit"] for rejected in refused.values()} == {"lookup"}
    assert remaining(limiter, "all") == 14
    assert_answered(client.requests[-1])
    await run(agent, "and now?", stream=stream, session=session)
    assert_answered(client.requests[-1])


@both_ways
async def test_r32_a_tenant_who_is_blocked_does_not_drain_what_all_share(
    clock: FakeClock, *, stream: bool
) -> None:
    limiting = {"shared": hourly(100, tools="lookup"), "lookup": hourly(1, per=["tenant"])}
    limiter = ToolRateLimitMiddleware(limiting, clock=clock)
    lookup = recorded()
    agent = agent_of(turns(20, "a", "u"), lookup, middleware=[limiter])
    for tenant in ("acme", "umbrella"):
        await run(agent, stream=stream, function_invocation_kwargs={"tenant": tenant})
    assert lookup.started == ["a1", "u1"]
    assert remaining(limiter, "shared") == 98


async def test_tools_that_no_limit_names_fall_under_the_default(clock: FakeClock) -> None:
    limiter = ToolRateLimitMiddleware(
        Limiter({"lookup": hourly(3)}, default=hourly(1, per=["tenant"]), clock=clock)
    )
    tools = [recorded(name) for name in ("lookup", "search", "pay")]
    turn = [*calls("lookup", 4, "l"), *calls("search", 2, "s"), *calls("pay", 2, "p")]
    client = OfflineChatClient(turn, "done", turn, "done")
    agent = agent_of(client, *tools, middleware=[limiter])
    await run(agent, function_invocation_kwargs={"tenant": "acme"})
    assert [tool.started for tool in tools] == [["l1", "l2", "l3"], ["s1"], ["p1"]]
    found = rejections(last_results(client))
    assert {call: rejected["limit"] for call, rejected in found.items()} == {
        "l4": "lookup",
        "s2": "[default]",
        "p2": "[default]",
    }
    assert str(last_results(client)["s2"].result).startswith(
        "Rate limit exceeded for tool 'search'. Retry in 3600 seconds."
    )
    await run(agent, function_invocation_kwargs={"tenant": "umbrella"})
    assert [len(tool.started) for tool in tools] == [3, 2, 2]


# --- dry run and reload --------------------------------------------------------------------------


@both_ways
async def test_in_a_dry_run_every_call_runs_untouched(clock: FakeClock, *, stream: bool) -> None:
    limiter = Limiter(limits(burst=2), dry_run=True, clock=clock)
    lookup = recorded()
    client = turns(5, "c")
    middleware = [ToolRateLimitMiddleware(limiter, on_rejected="terminate")]
    response = await run(agent_of(client, lookup, middleware=middleware), stream=stream)
    assert response.text == "done"
    assert len(lookup.started) == 5
    found = last_results(client)
    assert rejections(found) == {}
    assert all(content.result == f"lookup found {call}" for call, content in found.items())
    assert limiter.snapshot()["lookup"].remaining == 0


async def test_r49_a_reload_in_the_middle_of_a_run_holds_from_the_next_call_on(
    clock: FakeClock, tmp_path: Path
) -> None:
    file = tmp_path / "limits.toml"
    file.write_text("limits.lookup = { rate = '1/h', burst = 4 }")
    limiter = Limiter.from_file(file, clock=clock)

    def act(call: str) -> None:
        if call == "c2":
            file.write_text("limits.lookup = { rate = '1/h', burst = 1 }")
            limiter.reload(file)

    lookup = recorded(act=act)
    client = OfflineChatClient(*([call] for call in calls("lookup", 5)), "done")
    middleware = [ToolRateLimitMiddleware(limiter)]
    response = await run(agent_of(client, lookup, middleware=middleware))
    assert response.text == "done"
    # Two of the four were left, of which the new burst leaves one.
    assert lookup.started == ["c1", "c2", "c3"]
    assert set(rejections(last_results(client))) == {"c4", "c5"}
