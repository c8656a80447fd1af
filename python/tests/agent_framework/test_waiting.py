"""Calls that wait for their turn inside of the run: in order, each answered once, and no place is kept in vain.

The clock stands still where nothing is to be served, and is the real one where timers are under test.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterable
from pathlib import Path
from typing import Any

import agent_framework
import pytest
from agent_framework import (
    Agent,
    Content,
    FunctionInvocationContext,
    FunctionMiddleware,
    MCPStdioTool,
    Message,
)

from callgate import Decision, Limiter, RateLimitExceeded, ToolRateLimit
from callgate.agent_framework import ToolRateLimitMiddleware
from tests.agent_framework.scripted import (
    OfflineChatClient,
    Recorded,
    agent_of,
    assert_answered,
    both_ways,
    calls,
    last_results,
    recorded,
    rejections,
    remaining,
    results,
    run,
)
from tests.clocks import FakeClock
from tests.running import hammer

CURRENT = hasattr(agent_framework, "MiddlewareFailure")
"""Whether this is agent-framework-core 1.15 or later."""

RATE = 50
"""Tokens a second, where calls really wait."""


def waiting(
    rate: float = RATE,
    burst: int = 1,
    *,
    tool: str = "lookup",
    max_wait: float = 10,
    max_concurrent: int | None = None,
) -> dict[str, ToolRateLimit]:
    """The limit of one tool, whose calls may wait."""
    return {tool: ToolRateLimit(rate, burst, max_wait=max_wait, max_concurrent=max_concurrent)}


class Arrivals(FunctionMiddleware):
    """Stands around the limiter, and says when so many calls have come to it: each then runs or waits."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.complete = asyncio.Event()

    async def process(self, context: FunctionInvocationContext, call_next: Any) -> None:
        self.left -= 1
        if self.left == 0:
            self.complete.set()
        await call_next()


def served_in_turn(client: OfflineChatClient, lookup: Recorded, count: int) -> None:
    """Checks that each call of the last turn ran, in order of arrival, and was answered once."""
    expected = [f"c{number}" for number in range(1, count + 1)]
    found = last_results(client)
    assert lookup.started == expected
    assert {call: content.result for call, content in found.items()} == {
        call: f"lookup found {call}" for call in expected
    }
    assert list(found) == expected
    assert_answered(client.requests[-1])


def next_in(limiter: ToolRateLimitMiddleware) -> float | None:
    """Seconds until a call is served that comes now: a second for each token that others wait for."""
    return limiter.limiter.try_acquire("lookup").retry_after


# --- served in turn ------------------------------------------------------------------------------


@both_ways
async def test_r34_eight_calls_of_one_turn_wait_and_all_run_in_order_of_arrival(
    *, stream: bool
) -> None:
    moments: list[float] = []
    lookup = recorded(act=lambda _call: moments.append(time.monotonic()))
    before = time.monotonic()
    limiter = ToolRateLimitMiddleware(waiting())
    client = OfflineChatClient(calls("lookup", 8), "done", "all is well")
    agent = agent_of(client, lookup, middleware=[limiter])
    session = agent.create_session()
    response = await run(agent, stream=stream, session=session)

    assert response.text == "done"
    served_in_turn(client, lookup, 8)
    for number, moment in enumerate(moments):
        assert moment - before >= number / RATE
    response = await run(agent, "and now?", stream=stream, session=session)
    assert response.text == "all is well"
    assert_answered(client.requests[-1])


@both_ways
@pytest.mark.parametrize("place", ["agent", "run", "client"])
async def test_calls_wait_wherever_it_is_registered(place: str, *, stream: bool) -> None:
    here = {place: [ToolRateLimitMiddleware(waiting())]}
    lookup = recorded()
    client = OfflineChatClient(calls("lookup", 3), "done", middleware=here.get("client", []))
    agent = agent_of(client, lookup, middleware=here.get("agent", []))
    options: dict[str, Any] = {"middleware": here["run"]} if place == "run" else {}
    await run(agent, stream=stream, **options)
    served_in_turn(client, lookup, 3)


@both_ways
async def test_calls_wait_in_a_run_that_is_resumed_with_an_approval(*, stream: bool) -> None:
    limiter = ToolRateLimitMiddleware(waiting())
    lookup = recorded(approval_mode="always_require")
    client = OfflineChatClient(calls("lookup", 3), "done")
    agent = agent_of(client, lookup, middleware=[limiter])
    session = agent.create_session()
    paused = await run(agent, stream=stream, session=session)
    answers = [
        request.to_function_approval_response(True) for request in paused.user_input_requests
    ]
    response = await run(
        agent, Message(role="user", contents=answers), stream=stream, session=session
    )
    assert response.text == "done"
    served_in_turn(client, lookup, 3)


@both_ways
async def test_calls_wait_within_an_agent_used_as_a_tool_and_so_do_its_own(*, stream: bool) -> None:
    limiter = ToolRateLimitMiddleware({**waiting(), **waiting(tool="ask")})
    lookup = recorded()
    inner_client = OfflineChatClient(
        *(calls("lookup", 2, "i"), "found"), *(calls("lookup", 2, "j"), "found")
    )
    inner = agent_of(inner_client, lookup, middleware=[limiter])
    asking = [[(f"c{number}", "ask", {"task": "find it"})] for number in (1, 2)]
    client = OfflineChatClient(*asking, "done")
    agent = agent_of(client, inner.as_tool(name="ask"), middleware=[limiter])
    await run(agent, stream=stream)
    assert [content.result for content in last_results(client).values()] == ["found"] * 2
    assert lookup.started == ["i1", "i2", "j1", "j2"]
    assert_answered(client.requests[-1])


@both_ways
async def test_calls_of_an_mcp_tool_wait(tmp_path: Path, *, stream: bool) -> None:
    limiter = ToolRateLimitMiddleware(waiting())
    client = OfflineChatClient(calls("lookup", 3), "done")
    async with MCPStdioTool(
        name="files",
        command=sys.executable,
        args=[str(Path(__file__).with_name("mcp_server.py")), str(tmp_path)],
        load_prompts=False,
        approval_mode="never_require",
    ) as tools:
        await run(agent_of(client, *tools.functions, middleware=[limiter]), stream=stream)
    found = last_results(client)
    assert list(found) == ["c1", "c2", "c3"]
    assert all(f"lookup found {call}" in str(found[call].result) for call in found)


async def test_calls_that_the_framework_makes_one_after_another_wait_too() -> None:
    lookup = recorded()
    client = OfflineChatClient(
        calls("lookup", 3),
        "done",
        function_invocation_configuration={"allow_concurrent_invocation": False},
    )
    await run(agent_of(client, lookup, middleware=[ToolRateLimitMiddleware(waiting())]))
    served_in_turn(client, lookup, 3)


def test_runs_in_threads_with_loops_of_their_own_wait_for_one_quota() -> None:
    before = time.monotonic()
    limiter = ToolRateLimitMiddleware(waiting(rate=200))
    lookup = recorded()

    async def one(_number: int) -> int:
        client = OfflineChatClient(calls("lookup", 8), "done")
        await run(agent_of(client, lookup, middleware=[limiter]))
        found = last_results(client)
        assert list(found) == [f"c{number}" for number in range(1, 9)]
        return len(found) - len(rejections(found))

    assert hammer(lambda number: asyncio.run(one(number))) == len(lookup.started) == 32
    assert time.monotonic() - before >= 31 / 200


# --- some cannot be served in time ---------------------------------------------------------------


def call_of(context: FunctionInvocationContext) -> str:
    """The id that a call's argument says."""
    arguments: Any = context.arguments
    return str(arguments["call"])


def costs(**dear: int) -> Any:
    """What calls cost: 1, but for these."""

    def cost(context: FunctionInvocationContext) -> int:
        return dear.get(call_of(context), 1)

    return cost


@both_ways
async def test_a_call_that_cannot_be_served_in_time_is_rejected_before_those_that_wait_run(
    *, stream: bool
) -> None:
    log: list[str] = []

    def on_rejected(context: FunctionInvocationContext, decision: Decision) -> None:
        log.append(f"rejected {call_of(context)}")

    lookup = recorded(act=log.append)
    # The first call takes all there is; the third would have to wait for 10 s.
    limiter = ToolRateLimitMiddleware(
        waiting(burst=500, max_wait=5), cost=costs(c1=500, c3=500), on_rejected=on_rejected
    )
    client = OfflineChatClient(calls("lookup", 5), "done")
    response = await run(agent_of(client, lookup, middleware=[limiter]), stream=stream)
    assert response.text == "done"
    assert log == ["c1", "rejected c3", "c2", "c4", "c5"]
    found = last_results(client)
    assert list(found) == ["c1", "c2", "c3", "c4", "c5"]
    assert set(rejections(found)) == {"c3"}
    assert "Rate limit exceeded for tool 'lookup'. Retry in " in str(found["c3"].result)
    assert_answered(client.requests[-1])


@both_ways
async def test_a_rejection_that_ends_the_tool_loop_leaves_those_that_wait_their_turn(
    *, stream: bool
) -> None:
    lookup = recorded()
    limiter = ToolRateLimitMiddleware(
        waiting(burst=500, max_wait=5), cost=costs(c1=500, c3=500), on_rejected="terminate"
    )
    client = OfflineChatClient(calls("lookup", 4), "never said")
    response = await run(agent_of(client, lookup, middleware=[limiter]), stream=stream)
    assert len(client.requests) == 1
    assert lookup.started == ["c1", "c2", "c4"]
    found = results(response.messages)
    assert set(found) == {"c1", "c2", "c3", "c4"}
    assert set(rejections(found)) == {"c3"}
    assert_answered(response.messages)


@both_ways
@pytest.mark.skipif(not CURRENT, reason="needs agent-framework-core 1.15 or later")
async def test_a_rejection_that_ends_the_run_ends_the_waiting_which_spends_nothing(
    clock: FakeClock, *, stream: bool
) -> None:
    lookup = recorded()
    limiter = ToolRateLimitMiddleware(
        waiting(rate=1, burst=50),
        cost=costs(c1=50, c4=50),
        on_rejected="raise",
        clock=clock,
    )
    client = OfflineChatClient(calls("lookup", 5), "never said")
    with pytest.raises(agent_framework.MiddlewareFailure) as failed:
        await run(agent_of(client, lookup, middleware=[limiter]), stream=stream)
    assert isinstance(failed.value.__cause__, RateLimitExceeded)
    assert lookup.started == ["c1"]
    assert next_in(limiter) == pytest.approx(1)
    clock.advance(1)
    assert remaining(limiter) == 1


async def test_a_callable_words_the_rejection_of_a_call_whose_wait_was_in_vain() -> None:
    # Nobody knows when the call before it ends: it waits as long as it may.
    rejected = asyncio.Event()

    async def on_rejected(context: FunctionInvocationContext, decision: Decision) -> list[Content]:
        assert (call_of(context), decision.reason) == ("c2", "concurrency")
        rejected.set()
        return [Content.from_text("Busy.")]

    limiter = ToolRateLimitMiddleware(
        waiting(burst=9, max_concurrent=1, max_wait=0.05), on_rejected=on_rejected
    )
    lookup = recorded(act=lambda _call: rejected.wait())
    client = OfflineChatClient(calls("lookup", 2), "done")
    await asyncio.wait_for(run(agent_of(client, lookup, middleware=[limiter])), 30)
    assert [content.result for content in last_results(client).values()] == [
        "lookup found c1",
        "Busy.",
    ]


# --- those who leave -----------------------------------------------------------------------------


async def relayed(agent: Agent[Any]) -> AsyncGenerator[Any]:
    """What a web server does with a stream."""
    async for update in agent.run("go", stream=True):
        yield update


async def read_all(updates: AsyncIterable[Any]) -> None:
    async for _ in updates:
        pass


@pytest.mark.parametrize("way", ["run", "stream", "relay", "time-out"])
async def test_r39_a_run_that_is_cancelled_gives_up_the_places_of_its_calls_and_spends_nothing(
    way: str, clock: FakeClock
) -> None:
    lookup, arrivals = recorded(), Arrivals(4)
    limiter = ToolRateLimitMiddleware(waiting(rate=1), clock=clock)
    client = OfflineChatClient(calls("lookup", 4), "never said")
    agent = agent_of(client, lookup, middleware=[arrivals, limiter])
    updates = relayed(agent)
    task: asyncio.Task[Any] = asyncio.ensure_future(
        read_all(updates) if way == "relay" else run(agent, stream=way == "stream")
    )
    await asyncio.wait_for(arrivals.complete.wait(), 30)
    # One runs and three wait.
    assert next_in(limiter) == pytest.approx(4)
    if way == "time-out":
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(task, 0.01)
    else:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await updates.aclose()

    assert lookup.started == ["c1"]
    assert next_in(limiter) == pytest.approx(1)
    clock.advance(1)
    assert remaining(limiter) == 1
    assert limiter.limiter.try_acquire("lookup")


async def test_r39_a_stream_that_is_closed_before_its_calls_begin_spends_nothing(
    clock: FakeClock,
) -> None:
    lookup = recorded()
    limiter = ToolRateLimitMiddleware(waiting(rate=1), clock=clock)
    client = OfflineChatClient(calls("lookup", 3), "never said")
    updates = relayed(agent_of(client, lookup, middleware=[limiter]))
    async for update in updates:
        assert update.contents[0].type == "function_call"
        break
    await updates.aclose()
    assert lookup.started == []
    assert remaining(limiter) == 1


async def test_r39_those_behind_a_run_that_is_cancelled_move_up(clock: FakeClock) -> None:
    limiter = ToolRateLimitMiddleware(waiting(rate=20), clock=clock)
    before, behind = recorded(), recorded()
    arrivals = Arrivals(5)
    agents = [
        agent_of(OfflineChatClient(calls("lookup", count), "done"), lookup)
        for lookup, count in ((before, 4), (behind, 1))
    ]
    first, second = (
        asyncio.ensure_future(run(agent, middleware=[arrivals, limiter])) for agent in agents
    )
    await asyncio.wait_for(arrivals.complete.wait(), 30)
    assert next_in(limiter) == pytest.approx(5 / 20)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert next_in(limiter) == pytest.approx(2 / 20)
    # A token, which would have been for those before.
    clock.advance(1 / 20)
    response = await asyncio.wait_for(second, 30)
    assert response.text == "done"
    assert (before.started, behind.started) == (["c1"], ["c1"])


async def test_r39_a_call_that_is_cancelled_beside_others_leaves_them_their_turn() -> None:
    limiter = ToolRateLimitMiddleware(waiting())
    lookup, arrivals = recorded(), Arrivals(4)
    tasks: list[asyncio.Task[Any]] = []

    class Tell(FunctionMiddleware):
        async def process(self, context: FunctionInvocationContext, call_next: Any) -> None:
            task = asyncio.ensure_future(call_next())
            tasks.append(task)
            # What a time-out around one call does.
            await asyncio.wait([task])

    client = OfflineChatClient(calls("lookup", 4), "done")
    running = asyncio.ensure_future(
        run(agent_of(client, lookup, middleware=[Tell(), arrivals, limiter]))
    )
    await asyncio.wait_for(arrivals.complete.wait(), 30)
    tasks[1].cancel()
    response = await asyncio.wait_for(running, 30)
    assert response.text == "done"
    assert lookup.started == ["c1", "c3", "c4"]
    assert tasks[1].cancelled()


def test_r12_a_loop_that_is_thrown_away_gives_up_the_places_of_its_calls() -> None:
    limiter = ToolRateLimitMiddleware(waiting())
    stuck = recorded()

    async def abandon() -> None:
        arrivals = Arrivals(4)
        client = OfflineChatClient(calls("lookup", 4), "never said")
        agent = agent_of(client, stuck, middleware=[arrivals, limiter])
        left = asyncio.ensure_future(run(agent))
        await arrivals.complete.wait()
        assert not left.done()
        # `asyncio.run` cancels it and closes the loop.

    asyncio.run(abandon())
    lookup = recorded()
    client = OfflineChatClient(calls("lookup", 3), "done")
    asyncio.run(run(agent_of(client, lookup, middleware=[limiter])))
    assert stuck.started == ["c1"]
    served_in_turn(client, lookup, 3)


# --- registered more than once -------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("inside", [1, 2])
async def test_r37_a_limiter_that_is_registered_several_times_waits_once_and_not_for_itself(
    inside: int, clock: FakeClock, *, stream: bool
) -> None:
    limiter = Limiter(waiting(burst=8, max_concurrent=1), clock=clock)
    lookup = recorded(act=lambda _call: asyncio.sleep(0))
    client = OfflineChatClient(
        calls("lookup", 8), "done", middleware=[ToolRateLimitMiddleware(limiter)] * inside
    )
    outer = ToolRateLimitMiddleware(limiter)
    agent = agent_of(client, lookup, middleware=[outer])
    await asyncio.wait_for(run(agent, stream=stream, middleware=[outer]), 30)
    served_in_turn(client, lookup, 8)
    assert remaining(outer) == 0


async def test_r37_a_limiter_that_is_registered_twice_waits_for_one_token_a_call() -> None:
    limiter = ToolRateLimitMiddleware(waiting())
    lookup = recorded()
    client = OfflineChatClient(calls("lookup", 4), "done")
    await run(agent_of(client, lookup, middleware=[limiter, limiter]))
    served_in_turn(client, lookup, 4)


@pytest.mark.parametrize("max_wait", [0, 0.05])
async def test_an_inner_agents_call_that_waits_for_the_call_it_is_part_of_is_rejected_in_time(
    max_wait: float, clock: FakeClock
) -> None:
    # One limit holds for the agent as a tool and for its own tools, and one call may run at a time.
    limiter = ToolRateLimitMiddleware(
        waiting(burst=9, tool="*", max_wait=max_wait, max_concurrent=1), clock=clock
    )
    lookup = recorded()
    inner_client = OfflineChatClient(calls("lookup", 1), "it was busy")
    inner = agent_of(inner_client, lookup, middleware=[limiter])
    client = OfflineChatClient([("c1", "ask", {"task": "find it"})], "done")
    agent = agent_of(client, inner.as_tool(name="ask"), middleware=[limiter])
    response = await asyncio.wait_for(run(agent), 30)
    assert response.text == "done"
    assert lookup.started == []
    assert rejections(last_results(inner_client))["c1"]["reason"] == "concurrency"
    assert last_results(client)["c1"].result == "it was busy"
    # Nothing is held, and the inner call spent nothing.
    assert remaining(limiter, "*") == 8
    with limiter.limiter.try_acquire("lookup") as decision:
        assert decision.admitted
