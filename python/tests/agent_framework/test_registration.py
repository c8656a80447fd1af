"""Where the middleware may be registered, and what stands around it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from agent_framework import (
    FunctionInvocationContext,
    FunctionMiddleware,
    FunctionTool,
    function_middleware,
)
from agent_framework._middleware import FunctionMiddlewarePipeline

from callgate import Decision, Limiter, ToolRateLimit
from callgate._callgate import decision_counts
from callgate.agent_framework import ToolRateLimitMiddleware
from tests.agent_framework.scripted import (
    OfflineChatClient,
    Recorded,
    agent_of,
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


@both_ways
@pytest.mark.parametrize("place", ["agent", "run", "client"])
async def test_it_limits_wherever_it_is_registered(
    place: str, clock: FakeClock, *, stream: bool
) -> None:
    limiter = ToolRateLimitMiddleware(limits(burst=2), clock=clock)
    here = {place: [limiter]}
    lookup = recorded()
    client = OfflineChatClient(
        calls("lookup", 3),
        "done",
        calls("lookup", 1, "d"),
        "done",
        middleware=here.get("client", []),
    )
    agent = agent_of(client, lookup, middleware=here.get("agent", []))
    options: dict[str, Any] = {"middleware": here["run"]} if place == "run" else {}
    for _ in range(2):
        response = await run(agent, stream=stream, **options)
        assert response.text == "done"
    assert lookup.started == ["c1", "c2"]
    assert set(rejections(last_results(client))) == {"d1"}


async def test_on_one_run_it_limits_that_run_only(clock: FakeClock) -> None:
    limiter = ToolRateLimitMiddleware(limits(burst=1), clock=clock)
    lookup = recorded()
    turns = [turn for n in range(3) for turn in (calls("lookup", 2, f"t{n}-"), "done")]
    agent = agent_of(OfflineChatClient(*turns), lookup)
    await run(agent)
    await run(agent, middleware=[limiter])
    await run(agent)
    assert lookup.started == ["t0-1", "t0-2", "t1-1", "t2-1", "t2-2"]


async def test_two_limiters_must_both_admit(clock: FakeClock) -> None:
    narrow = ToolRateLimitMiddleware(limits(burst=1), clock=clock)
    wide = ToolRateLimitMiddleware(limits(burst=3), clock=clock)
    lookup = recorded()
    client = OfflineChatClient(calls("lookup", 5), "done", middleware=[narrow])
    await run(agent_of(client, lookup, middleware=[wide]))
    assert len(lookup.started) == 1
    assert len(rejections(last_results(client))) == 4


# --- beside other middleware ---------------------------------------------------------------------


class Before(FunctionMiddleware):
    """Stands around the limiter and sees what it leaves."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    async def process(self, context: FunctionInvocationContext, call_next: Any) -> None:
        self.log.append("before")
        await call_next()
        self.log.append(("result", str(context.result[0]), "rate_limit" in context.metadata))


def after(log: list[Any]) -> Any:
    """A function that stands between the limiter and the tool."""

    @function_middleware
    async def middleware(context: FunctionInvocationContext, call_next: Any) -> None:
        log.append("after")
        await call_next()
        log.append("tool")

    return middleware


REJECTED = ("result", "Rate limit exceeded for tool 'lookup'. Retry in 1 second.", True)


async def invoke(pipeline: FunctionMiddlewarePipeline, lookup: Recorded, call: str) -> Any:
    """One call through a pipeline."""
    context = FunctionInvocationContext(function=lookup.tool, arguments={"call": call})
    return await pipeline.execute(
        context, lambda inner: lookup.tool.invoke(arguments=inner.arguments, context=inner)
    )


async def test_in_a_pipeline_those_before_see_the_rejection_and_those_after_see_no_call(
    clock: FakeClock,
) -> None:
    log: list[Any] = []
    lookup = recorded(act=log.append)
    limiter = ToolRateLimitMiddleware(limits(), clock=clock)
    pipeline = FunctionMiddlewarePipeline(Before(log), limiter, after(log))

    await invoke(pipeline, lookup, "c1")
    admitted = ["before", "after", "c1", "tool", ("result", "lookup found c1", False)]
    assert log == admitted
    (content,) = await invoke(pipeline, lookup, "c2")
    assert log == [*admitted, "before", REJECTED]
    assert str(content) == REJECTED[1]


async def test_in_an_agent_it_stands_where_it_was_put(clock: FakeClock) -> None:
    log: list[Any] = []
    lookup = recorded(act=log.append)
    limiter = ToolRateLimitMiddleware(limits(), clock=clock)
    client = OfflineChatClient(calls("lookup", 1), calls("lookup", 1, "d"), "done")
    await run(agent_of(client, lookup, middleware=[Before(log), limiter, after(log)]))
    assert log == [
        *("before", "after", "c1", "tool", ("result", "lookup found c1", False)),
        *("before", REJECTED),
    ]


async def test_middleware_that_answers_before_it_spends_nothing(clock: FakeClock) -> None:
    @function_middleware
    async def cache(context: FunctionInvocationContext, call_next: Any) -> None:
        context.result = "from the cache"

    lookup = recorded()
    limiter = ToolRateLimitMiddleware(limits(), clock=clock)
    client = OfflineChatClient(calls("lookup", 3), "done")
    await run(agent_of(client, lookup, middleware=[cache, limiter]))
    assert lookup.started == []
    assert remaining(limiter) == 1
    assert {content.result for content in last_results(client).values()} == {"from the cache"}


async def test_middleware_that_retries_around_it_is_charged_for_each_attempt(
    clock: FakeClock,
) -> None:
    @function_middleware
    async def retry(context: FunctionInvocationContext, call_next: Any) -> None:
        for _ in range(3):
            await call_next()

    lookup = recorded()
    limiter = ToolRateLimitMiddleware(limits(burst=2), clock=clock)
    client = OfflineChatClient(calls("lookup", 1), "done")
    await run(agent_of(client, lookup, middleware=[retry, limiter]))
    assert lookup.started == ["c1", "c1"]
    assert set(rejections(last_results(client))) == {"c1"}


async def test_an_attempt_that_is_admitted_leaves_no_rejection_behind(clock: FakeClock) -> None:
    seen: list[bool] = []

    @function_middleware
    async def retry_later(context: FunctionInvocationContext, call_next: Any) -> None:
        await call_next()
        seen.append("rate_limit" in context.metadata)
        clock.advance(1)
        await call_next()
        seen.append("rate_limit" in context.metadata)

    lookup = recorded()
    limiter = ToolRateLimitMiddleware(limits(burst=1), clock=clock)
    assert limiter.limiter.try_acquire("lookup")
    client = OfflineChatClient(calls("lookup", 1), "done")
    await run(agent_of(client, lookup, middleware=[retry_later, limiter]))
    assert lookup.started == ["c1"]
    assert seen == [True, False]


def test_its_limiter_cannot_be_swapped(clock: FakeClock) -> None:
    limiter = ToolRateLimitMiddleware(limits(), clock=clock)
    with pytest.raises(AttributeError):
        limiter.limiter = Limiter({})  # type: ignore[misc]


async def test_middleware_may_replace_what_a_rejection_says(clock: FakeClock) -> None:
    @function_middleware
    async def replace(context: FunctionInvocationContext, call_next: Any) -> None:
        await call_next()
        decision = context.metadata.get("rate_limit")
        if decision is not None:
            assert isinstance(decision, Decision)
            context.result = f"{decision.tool} is busy"

    limiter = ToolRateLimitMiddleware(limits(), clock=clock)
    client = OfflineChatClient(calls("lookup", 2), "done")
    await run(agent_of(client, recorded(), middleware=[replace, limiter]))
    assert [content.result for content in last_results(client).values()] == [
        "lookup found c1",
        "lookup is busy",
    ]


# --- whose quota it is ---------------------------------------------------------------------------


async def test_r37_a_tool_that_is_wrapped_twice_has_one_bucket_and_is_charged_once_a_call(
    clock: FakeClock,
) -> None:
    limiter = ToolRateLimitMiddleware(limits(burst=3), clock=clock)
    lookup = recorded()
    again = FunctionTool(name="lookup", func=lookup.tool.func)
    for prefix, wrapped in (("a", lookup.tool), ("b", again)):
        client = OfflineChatClient(calls("lookup", 2, prefix), "done")
        await run(agent_of(client, wrapped, middleware=[limiter]))
    assert lookup.started == ["a1", "a2", "b1"]


async def test_r37_a_rebuilt_agent_gets_no_fresh_bucket_and_a_tool_keeps_no_state(
    clock: FakeClock,
) -> None:
    limiter = ToolRateLimitMiddleware(limits(burst=3), clock=clock)
    lookup = recorded()

    async def request(middleware: ToolRateLimitMiddleware, number: int) -> None:
        client = OfflineChatClient(calls("lookup", 1, f"r{number}-"), "done")
        await run(agent_of(client, lookup, middleware=[middleware]))

    for number in range(5):
        await request(limiter, number)
    assert lookup.started == ["r0-1", "r1-1", "r2-1"]
    # The same tool object under another limit has that limit's tokens.
    await request(ToolRateLimitMiddleware(limits(), clock=clock), 9)
    assert lookup.started[3:] == ["r9-1"]


async def test_agents_that_share_a_limiter_share_its_quota(clock: FakeClock) -> None:
    limiter = Limiter(limits(burst=3), clock=clock)
    lookup = recorded()
    found: list[int] = []
    for prefix in ("a", "b"):
        client = OfflineChatClient(calls("lookup", 2, prefix), "done")
        middleware = ToolRateLimitMiddleware(limiter)
        assert middleware.limiter is limiter
        await run(agent_of(client, lookup, middleware=[middleware]))
        found.append(len(rejections(last_results(client))))
    assert found == [0, 1]
    assert not limiter.try_acquire("lookup")


async def test_middlewares_from_one_mapping_have_quotas_of_their_own(clock: FakeClock) -> None:
    lookup = recorded()
    limit = limits(burst=1)
    for prefix in ("a", "b"):
        client = OfflineChatClient(calls("lookup", 2, prefix), "done")
        limiter = ToolRateLimitMiddleware(limit, clock=clock)
        await run(agent_of(client, lookup, middleware=[limiter]))
    assert lookup.started == ["a1", "b1"]


# --- registered more than once -------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("shared", ["instance", "limiter"])
@pytest.mark.parametrize(
    "places", [("agent", "run"), ("agent", "client"), ("run", "client"), ("agent", "run", "client")]
)
async def test_r37_a_limiter_that_is_registered_in_several_places_charges_a_call_once(
    places: tuple[str, ...], shared: str, clock: FakeClock, *, stream: bool
) -> None:
    limiter = Limiter(limits(burst=4), clock=clock)
    instance = ToolRateLimitMiddleware(limiter)

    def here(place: str) -> list[ToolRateLimitMiddleware]:
        if place not in places:
            return []
        return [instance if shared == "instance" else ToolRateLimitMiddleware(limiter)]

    lookup = recorded()
    client = OfflineChatClient(
        calls("lookup", 2), "done", calls("lookup", 3, "d"), "done", middleware=here("client")
    )
    agent = agent_of(client, lookup, middleware=here("agent"))
    for _ in range(2):
        response = await run(agent, stream=stream, middleware=here("run"))
        assert response.text == "done"
    assert lookup.started == ["c1", "c2", "d1", "d2"]
    assert set(rejections(last_results(client))) == {"d3"}


@pytest.mark.parametrize("times", [2, 3, 5])
async def test_r37_the_same_instance_several_times_in_one_list_charges_a_call_once(
    times: int, clock: FakeClock
) -> None:
    limiter = ToolRateLimitMiddleware(limits(burst=3), clock=clock)
    lookup = recorded()
    client = OfflineChatClient(calls("lookup", 4), "done")
    await run(agent_of(client, lookup, middleware=[limiter] * times))
    assert lookup.started == ["c1", "c2", "c3"]
    assert set(rejections(last_results(client))) == {"c4"}


async def test_limiters_that_are_not_the_same_both_charge_however_they_are_nested(
    clock: FakeClock,
) -> None:
    one, other = (ToolRateLimitMiddleware(limits(burst=9), clock=clock) for _ in range(2))
    lookup = recorded()
    client = OfflineChatClient(calls("lookup", 3), "done")
    await run(agent_of(client, lookup, middleware=[one, other, one, other]))
    assert len(lookup.started) == 3
    assert (remaining(one), remaining(other)) == (6, 6)


async def test_r37_a_dry_run_that_is_registered_twice_says_so_once(clock: FakeClock) -> None:
    name = "refused in a dry run"
    limiter = Limiter(limits(burst=1, tool=name), dry_run=True, clock=clock)
    twice = [ToolRateLimitMiddleware(limiter), ToolRateLimitMiddleware(limiter)]
    lookup = recorded(name)
    await run(agent_of(OfflineChatClient(calls(name, 3), "done"), lookup, middleware=twice))
    assert len(lookup.started) == 3
    counted = {outcome: count for tool, _, outcome, count in decision_counts() if tool == name}
    assert counted == {"admitted": 1, "would_reject_rate": 2}


def retrying(attempts: int) -> Any:
    """Middleware that goes on so many times, one after another."""

    @function_middleware
    async def middleware(context: FunctionInvocationContext, call_next: Any) -> None:
        for _ in range(attempts):
            await call_next()

    return middleware


def hedging(attempts: int) -> Any:
    """Middleware that goes on so many times at once."""

    @function_middleware
    async def middleware(context: FunctionInvocationContext, call_next: Any) -> None:
        await asyncio.gather(*(call_next() for _ in range(attempts)))

    return middleware


def failing(attempts: int) -> Any:
    """Middleware that goes on again while what is further in fails."""

    @function_middleware
    async def middleware(context: FunctionInvocationContext, call_next: Any) -> None:
        for _ in range(attempts):
            with suppress(RuntimeError):
                await call_next()

    return middleware


def copying(attempts: int) -> Any:
    """Middleware that gives each attempt metadata as they were for the first."""

    @function_middleware
    async def middleware(context: FunctionInvocationContext, call_next: Any) -> None:
        before = dict(context.metadata)
        for _ in range(attempts):
            context.metadata = dict(before)
            await call_next()

    return middleware


@both_ways
@pytest.mark.parametrize("between", [retrying, hedging, copying])
@pytest.mark.parametrize("inside", [1, 2])
async def test_r37_what_middleware_makes_of_one_call_is_charged_for_each_body_that_runs(
    between: Any, inside: int, clock: FakeClock, *, stream: bool
) -> None:
    limiter = ToolRateLimitMiddleware(limits(burst=100), clock=clock)
    lookup = recorded(act=lambda _call: asyncio.sleep(0))
    client = OfflineChatClient(calls("lookup", 1), "done")
    middleware = [limiter, between(3), *[limiter] * inside]
    await run(agent_of(client, lookup, middleware=middleware), stream=stream)
    assert lookup.started == ["c1"] * 3
    spent = 100 - (remaining(limiter) or 0)
    # In tasks of their own, all three are charged beside the call that they were made of.
    assert spent == (4 if between is hedging else 3)


@pytest.mark.parametrize("outside", [retrying, hedging, copying])
@pytest.mark.parametrize("inside", [1, 2, 3])
async def test_r37_attempts_from_outside_are_each_charged_once(
    outside: Any, inside: int, clock: FakeClock
) -> None:
    limiter = ToolRateLimitMiddleware(limits(burst=100), clock=clock)
    lookup = recorded(act=lambda _call: asyncio.sleep(0))
    client = OfflineChatClient(calls("lookup", 2), "done")
    await run(agent_of(client, lookup, middleware=[outside(3), *[limiter] * inside]))
    assert sorted(lookup.started) == ["c1"] * 3 + ["c2"] * 3
    assert remaining(limiter) == 94


async def test_r37_attempts_at_every_depth_are_each_charged(clock: FakeClock) -> None:
    limiter = ToolRateLimitMiddleware(limits(burst=100), clock=clock)
    lookup = recorded()
    client = OfflineChatClient(calls("lookup", 1), "done")
    stack = [retrying(2), limiter, retrying(2), limiter, retrying(2), limiter]
    await run(agent_of(client, lookup, middleware=stack))
    assert len(lookup.started) == 8
    assert remaining(limiter) == 92


async def test_r37_attempts_after_a_failure_are_each_charged(clock: FakeClock) -> None:
    def fail(_call: str) -> None:
        raise RuntimeError

    for stack in ([0, 1, 1], [1, 0, 1], [1, 1, 0]):
        limiter = ToolRateLimitMiddleware(limits(burst=100), clock=clock)
        lookup = recorded(act=fail)
        client = OfflineChatClient(calls("lookup", 1), "done")
        middleware = [limiter if limits_here else failing(4) for limits_here in stack]
        await run(agent_of(client, lookup, middleware=middleware))
        # Innermost it retries the tool by itself, and nobody is asked.
        assert len(lookup.started) == 4
        assert remaining(limiter) == (99 if stack[-1] == 0 else 96)


async def test_r37_a_rejection_inside_of_attempts_is_answered_once_and_spends_nothing(
    clock: FakeClock,
) -> None:
    limiter = ToolRateLimitMiddleware(limits(burst=2), clock=clock)
    lookup = recorded()
    client = OfflineChatClient(calls("lookup", 1), "done")
    await run(agent_of(client, lookup, middleware=[limiter, retrying(4), limiter]))
    assert lookup.started == ["c1", "c1"]
    assert rejections(last_results(client))["c1"]["retry_after"] == pytest.approx(1)


async def test_an_inner_agents_calls_are_charged_though_the_outer_call_was(
    clock: FakeClock,
) -> None:
    # The outer middleware waits on the same stack, but for another call.
    limiter = ToolRateLimitMiddleware({"*": ToolRateLimit(1, 100)}, clock=clock)
    lookup = recorded()
    inner = agent_of(
        OfflineChatClient(calls("lookup", 3), "found"), lookup, middleware=[limiter] * 2
    )
    client = OfflineChatClient([("c1", "ask", {"task": "find it"})], "done")
    await run(agent_of(client, inner.as_tool(name="ask"), middleware=[limiter] * 2))
    assert len(lookup.started) == 3
    assert remaining(limiter, "*") == 96


async def test_r37_three_days_at_50_a_minute_under_60_a_minute_are_never_refused(
    clock: FakeClock,
) -> None:
    limiter = ToolRateLimitMiddleware(
        {"lookup": ToolRateLimit.per_minute(60, burst=1)}, clock=clock
    )
    lookup = recorded()
    start, ran = clock.now, 0

    async def call_next() -> None:
        nonlocal ran
        ran += 1

    for number in range(3 * 24 * 60 * 50):
        clock.now = start + number * 1.2
        context = FunctionInvocationContext(function=lookup.tool, arguments={"call": "c"})
        await limiter.process(context, call_next)
        assert context.result is None
    assert ran == 216_000
