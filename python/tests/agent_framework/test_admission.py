"""Which calls of a running agent are admitted, and that the others never start."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agent_framework import FunctionInvocationContext, function_middleware
from agent_framework._middleware import FunctionMiddlewarePipeline

from callgate import Limiter, ToolRateLimit
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
    results,
    run,
)
from tests.clocks import FakeClock


@both_ways
async def test_calls_within_the_quota_run_untouched(clock: FakeClock, *, stream: bool) -> None:
    lookup = recorded()
    limiter = ToolRateLimitMiddleware(limits(burst=3), clock=clock)
    client = OfflineChatClient(calls("lookup", 3), "done")
    response = await run(agent_of(client, lookup, middleware=[limiter]), stream=stream)

    assert lookup.started == ["c1", "c2", "c3"]
    found = results(response.messages)
    assert {call: content.result for call, content in found.items()} == {
        call: f"lookup found {call}" for call in ("c1", "c2", "c3")
    }
    assert rejections(found) == {}
    assert response.text == "done"


@both_ways
async def test_beyond_the_burst_calls_are_rejected_before_the_tool_starts(
    clock: FakeClock, *, stream: bool
) -> None:
    lookup = recorded()
    limiter = ToolRateLimitMiddleware(limits(rate=2, burst=2), clock=clock)
    client = OfflineChatClient(calls("lookup", 3), "done")
    response = await run(agent_of(client, lookup, middleware=[limiter]), stream=stream)

    assert len(lookup.started) == 2
    (rejected,) = rejections(results(response.messages)).items()
    call, said = rejected
    assert call not in lookup.started
    assert said == {
        "tool": "lookup",
        "limit": "lookup",
        "reason": "rate",
        "remaining": 0,
        "retry_after": pytest.approx(0.5),
    }
    assert results(response.messages)[call].result == (
        "Rate limit exceeded for tool 'lookup'. Retry in 0.5 seconds."
    )
    assert response.text == "done"


async def test_each_tool_has_a_quota_of_its_own(clock: FakeClock) -> None:
    lookup, pay, free = recorded("lookup"), recorded("pay"), recorded("free")
    limiter = ToolRateLimitMiddleware(
        {"lookup": ToolRateLimit(2, 2), "pay": ToolRateLimit(1, 1)}, clock=clock
    )
    turn = [*calls("lookup", 3, "l"), *calls("pay", 3, "p"), *calls("free", 9, "f")]
    client = OfflineChatClient(turn, "done")
    await run(agent_of(client, lookup, pay, free, middleware=[limiter]))

    assert lookup.started == ["l1", "l2"]
    assert pay.started == ["p1"]
    assert len(free.started) == 9
    assert set(rejections(last_results(client))) == {"l3", "p2", "p3"}


async def test_tools_that_no_limit_names_are_untouched(clock: FakeClock) -> None:
    free = recorded("free")
    seen: list[dict[str, Any]] = []

    @function_middleware
    async def look(context: FunctionInvocationContext, call_next: Any) -> None:
        await call_next()
        seen.append(context.metadata)

    limiter = ToolRateLimitMiddleware(limits(), clock=clock)
    client = OfflineChatClient(calls("free", 200), "done")
    await run(agent_of(client, free, middleware=[look, limiter]))

    assert len(free.started) == 200
    assert all("rate_limit" not in metadata for metadata in seen)
    assert remaining(limiter) == 1


async def test_the_bucket_refills_as_the_clock_says(clock: FakeClock) -> None:
    lookup = recorded()
    limiter = ToolRateLimitMiddleware(limits(rate=2, burst=2), clock=clock)
    turns = [turn for n in range(4) for turn in (calls("lookup", 3, f"t{n}-"), "done")]
    agent = agent_of(OfflineChatClient(*turns), lookup, middleware=[limiter])
    started: list[int] = []
    for elapsed in (0.0, 0.4999, 0.0002, 100.0):
        clock.advance(elapsed)
        lookup.started.clear()
        await run(agent)
        started.append(len(lookup.started))
    assert started == [2, 0, 1, 2]


@both_ways
async def test_of_100_calls_in_one_turn_exactly_the_burst_runs(
    clock: FakeClock, *, stream: bool
) -> None:
    lookup = recorded()
    limiter = ToolRateLimitMiddleware(limits(burst=17), clock=clock)
    client = OfflineChatClient(calls("lookup", 100), "done")
    await run(agent_of(client, lookup, middleware=[limiter]), stream=stream)

    assert len(lookup.started) == 17
    found = last_results(client)
    assert list(found) == [f"c{n}" for n in range(1, 101)]
    assert len(rejections(found)) == 83


async def test_of_100_simultaneous_invocations_exactly_the_burst_runs(clock: FakeClock) -> None:
    lookup = recorded(act=lambda _call: asyncio.sleep(0))
    limiter = ToolRateLimitMiddleware(limits(burst=17), clock=clock)
    pipeline = FunctionMiddlewarePipeline(limiter)

    async def invoke(number: int) -> Any:
        context = FunctionInvocationContext(function=lookup.tool, arguments={"call": f"c{number}"})
        return await pipeline.execute(
            context, lambda inner: lookup.tool.invoke(arguments=inner.arguments, context=inner)
        )

    found = await asyncio.gather(*(invoke(number) for number in range(100)))
    assert len(lookup.started) == 17
    rejected = [items for items in found if "rate_limit" in items[0].additional_properties]
    assert len(rejected) == 83


async def test_of_100_simultaneous_runs_exactly_the_burst_runs_the_tool(clock: FakeClock) -> None:
    lookup = recorded(act=lambda _call: asyncio.sleep(0))
    limiter = ToolRateLimitMiddleware(limits(burst=17), clock=clock)
    clients = [OfflineChatClient(calls("lookup", 1), "done") for _ in range(100)]
    agents = [agent_of(client, lookup, middleware=[limiter]) for client in clients]
    responses = await asyncio.gather(*(run(agent) for agent in agents))

    assert len(lookup.started) == 17
    assert sum(len(rejections(last_results(client))) for client in clients) == 83
    assert {response.text for response in responses} == {"done"}


@both_ways
async def test_r34_eight_parallel_calls_against_a_burst_of_six(
    clock: FakeClock, *, stream: bool
) -> None:
    cancelled: list[str] = []

    async def take_a_while(call: str) -> None:
        try:
            await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            cancelled.append(call)
            raise

    lookup, other = recorded(act=take_a_while), recorded("other")
    limit = {"lookup": ToolRateLimit.parse("1/h", burst=6)}
    client = OfflineChatClient(
        calls("lookup", 8), "two must wait", calls("other", 1, "d"), "all is well"
    )
    limiter = ToolRateLimitMiddleware(limit, clock=clock)
    agent = agent_of(client, lookup, other, middleware=[limiter])
    session = agent.create_session()
    response = await run(agent, stream=stream, session=session)

    ids = [f"c{n}" for n in range(1, 9)]
    assert len(lookup.started) == len(set(lookup.started)) == 6
    found = last_results(client)
    assert list(found) == ids
    assert list(results(response.messages)) == ids
    refused = rejections(found)
    assert set(refused) == set(ids) - set(lookup.started)
    for call, content in found.items():
        assert content.exception is None
        if call in refused:
            assert refused[call]["retry_after"] == pytest.approx(3600)
            expected = "Rate limit exceeded for tool 'lookup'. Retry in 3600 seconds."
        else:
            expected = f"lookup found {call}"
        assert content.result == expected
    assert cancelled == []
    assert_answered(client.requests[1])
    assert response.text == "two must wait"

    # A normal second turn, on the stored history.
    response = await run(agent, "and now?", stream=stream, session=session)
    assert response.text == "all is well"
    assert other.started == ["d1"]
    assert_answered(client.requests[-1])
    assert set(last_results(client)) == {*ids, "d1"}


async def test_rejections_are_no_tool_errors_so_the_loop_does_not_give_up(clock: FakeClock) -> None:
    lookup, free = recorded(), recorded("free")
    limiter = ToolRateLimitMiddleware(limits(burst=1), clock=clock)
    turns = [[*calls("lookup", 2, f"t{n}-"), *calls("free", 1, f"f{n}-")] for n in range(8)]
    client = OfflineChatClient(*turns, "done")
    response = await run(agent_of(client, lookup, free, middleware=[limiter]))

    assert response.text == "done"
    assert lookup.started == ["t0-1"]
    assert len(free.started) == 8
    assert len(rejections(last_results(client))) == 15


async def test_a_tool_that_raises_has_spent_its_token_and_holds_nothing(clock: FakeClock) -> None:
    def fail(_call: str) -> None:
        raise RuntimeError("no such customer")

    lookup, other = recorded(act=fail), recorded("other")
    limiter = ToolRateLimitMiddleware(
        {"lookup": ToolRateLimit(1, 2), "other": ToolRateLimit(1, 2)}, clock=clock
    )
    turn = [*calls("lookup", 3), *calls("other", 1, "d")]
    client = OfflineChatClient(turn, "done", calls("lookup", 1, "e"), "done")
    agent = agent_of(client, lookup, other, middleware=[limiter])
    await run(agent)

    found = last_results(client)
    assert lookup.started == ["c1", "c2"]
    assert [found[call].exception is not None for call in ("c1", "c2", "c3", "d1")] == [
        True,
        True,
        False,
        False,
    ]
    assert set(rejections(found)) == {"c3"}
    assert remaining(limiter) == 0

    clock.advance(1)
    await run(agent)
    assert lookup.started == ["c1", "c2", "e1"]


@both_ways
async def test_sync_tools_are_limited_alike(clock: FakeClock, *, stream: bool) -> None:
    lookup = recorded(sync=True)
    limiter = ToolRateLimitMiddleware(limits(burst=3), clock=clock)
    client = OfflineChatClient(calls("lookup", 9), "done")
    await run(agent_of(client, lookup, middleware=[limiter]), stream=stream)

    assert len(lookup.started) == 3
    found = last_results(client)
    assert set(rejections(found)) == {f"c{n}" for n in range(1, 10)} - set(lookup.started)
    assert_answered(client.requests[-1])


async def test_equal_calls_are_told_apart_by_their_ids(clock: FakeClock) -> None:
    lookup = recorded()
    limiter = ToolRateLimitMiddleware(limits(burst=2), clock=clock)
    ids = ["call_7", "1", "01", "ä", "call_7b"]
    client = OfflineChatClient([(call, "lookup", {"call": "same"}) for call in ids], "done")
    await run(agent_of(client, lookup, middleware=[limiter]))

    assert lookup.started == ["same", "same"]
    found = last_results(client)
    assert list(found) == ids
    assert len(rejections(found)) == 3


# --- nothing is locked while a tool runs ---------------------------------------------------------


async def test_a_slow_tool_delays_no_other_call(clock: FakeClock) -> None:
    arrived = asyncio.Event()

    async def wait_for_the_others(call: str) -> None:
        # Each call ends only once the last one has started: in a queue this would never end.
        if call == "c5":
            arrived.set()
        await arrived.wait()

    lookup = recorded(act=wait_for_the_others)
    limiter = ToolRateLimitMiddleware(limits(burst=5), clock=clock)
    client = OfflineChatClient(calls("lookup", 5), "done")
    response = await asyncio.wait_for(run(agent_of(client, lookup, middleware=[limiter])), 30)
    assert response.text == "done"
    assert len(lookup.started) == 5


async def test_a_tool_may_ask_its_own_limiter(clock: FakeClock) -> None:
    limiter = Limiter(limits(burst=2), clock=clock)
    asked: list[bool] = []

    def ask(_call: str) -> None:
        assert limiter.snapshot()["lookup"].remaining == 1
        asked.append(limiter.try_acquire("lookup").admitted)
        asked.append(limiter.try_acquire("lookup").admitted)

    lookup = recorded(act=ask)
    client = OfflineChatClient(calls("lookup", 1), "done")
    await run(agent_of(client, lookup, middleware=[ToolRateLimitMiddleware(limiter)]))
    assert asked == [True, False]
    assert last_results(client)["c1"].exception is None


async def test_a_tool_may_run_an_agent_with_the_same_middleware(clock: FakeClock) -> None:
    limiter = ToolRateLimitMiddleware(limits(burst=2), clock=clock)
    inner_client = OfflineChatClient(calls("lookup", 2, "inner"), "inner done")

    async def run_inner(call: str) -> None:
        if call == "c1":
            await run(agent_of(inner_client, lookup, middleware=[limiter]))

    lookup = recorded(act=run_inner)
    client = OfflineChatClient(calls("lookup", 1), "done")
    response = await asyncio.wait_for(run(agent_of(client, lookup, middleware=[limiter])), 30)
    assert response.text == "done"
    assert lookup.started == ["c1", "inner1"]
    assert set(rejections(last_results(inner_client))) == {"inner2"}


# --- clocks that misbehave -----------------------------------------------------------------------


async def test_a_clock_stepping_back_mints_nothing_and_blocks_nobody(clock: FakeClock) -> None:
    lookup = recorded()
    limiter = ToolRateLimitMiddleware(limits(rate=1, burst=2), clock=clock)
    turns = [turn for n in range(4) for turn in (calls("lookup", 3, f"t{n}-"), "done")]
    agent = agent_of(OfflineChatClient(*turns), lookup, middleware=[limiter])
    started: list[int] = []
    for step in (0.0, -3600.0, 1.0, 1.0):
        clock.advance(step)
        lookup.started.clear()
        await run(agent)
        started.append(len(lookup.started))
    assert started == [2, 0, 1, 1]


async def test_r09_a_clock_that_is_1_6_s_low_on_every_second_call() -> None:
    now, low = 1000.0, True

    def clock() -> float:
        nonlocal low
        low = not low
        return now - 1.6 if low else now

    lookup = recorded()
    limiter = ToolRateLimitMiddleware(limits(rate=1, burst=5), clock=clock)
    pipeline = FunctionMiddlewarePipeline(limiter)

    async def invoke() -> None:
        context = FunctionInvocationContext(function=lookup.tool, arguments={"call": "c"})
        await pipeline.execute(context, lambda inner: lookup.tool.invoke(arguments=inner.arguments))

    for _ in range(5):
        await invoke()
    assert len(lookup.started) == 5
    for _ in range(1000):
        now += 0.1
        await invoke()
    assert 5 + 0.95 * 100 <= len(lookup.started) <= 5 + 100


async def test_r35_a_clock_that_fails_lets_no_call_through_and_tells_the_model_nothing(
    clock: FakeClock,
) -> None:
    broken = False

    def read() -> float:
        if broken:
            raise OSError("secret host 10.0.0.7 does not answer")
        return clock()

    lookup, free = recorded(), recorded("free")
    limiter = ToolRateLimitMiddleware(limits(burst=5), clock=read)
    turn = [*calls("lookup", 2), *calls("free", 1, "f")]
    client = OfflineChatClient(turn, "done")
    broken = True
    response = await run(agent_of(client, lookup, free, middleware=[limiter]))
    assert response.text == "done"
    assert lookup.started == []
    assert free.started == ["f1"]
    for call in ("c1", "c2"):
        assert "10.0.0.7" not in str(last_results(client)[call].result)
