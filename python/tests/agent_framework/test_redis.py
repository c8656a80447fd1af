"""Agents whose limiter asks a Redis store: their loop goes on meanwhile, and what becomes of calls when it fails."""

from __future__ import annotations

import asyncio
from typing import Any

import agent_framework
import pytest
from opentelemetry.metrics import CallbackOptions

from callgate import Limiter, StoreError, ToolRateLimit, _telemetry
from callgate.agent_framework import ToolRateLimitMiddleware
from tests.servers import Server

from .scripted import (
    OfflineChatClient,
    agent_of,
    assert_answered,
    both_ways,
    calls,
    last_results,
    recorded,
    rejections,
    run,
)

NOBODY = "redis://127.0.0.1:1/0?prefix=test"
"""Where nobody listens."""


def hourly(burst: int, **options: Any) -> ToolRateLimit:
    """A limit that refills too slowly for a test to see."""
    return ToolRateLimit.parse("1/h", burst, **options)


@both_ways
async def test_r34_of_eight_calls_of_one_turn_the_burst_runs(
    redis_url: str, *, stream: bool
) -> None:
    limiter = Limiter({"lookup": hourly(6)}, store=redis_url)
    tool = recorded()
    client = OfflineChatClient(calls("lookup", 8), calls("lookup", 2, "d"), "done")
    agent = agent_of(client, tool, middleware=[ToolRateLimitMiddleware(limiter)])
    await run(agent, stream=stream)
    assert len(tool.started) == 6
    assert len(set(tool.started)) == 6
    for request in client.requests[1:]:
        assert_answered(request)
    snapshot = await asyncio.to_thread(limiter.snapshot)
    assert snapshot["lookup"].remaining == 0


async def test_the_loop_goes_round_while_the_store_is_asked(server: Server) -> None:
    limiter = Limiter({"lookup": hourly(9)}, store=server.url())
    assert await limiter.acquire("lookup")
    events: list[str] = []
    tool = recorded(act=events.append)
    client = OfflineChatClient(calls("lookup", 3), "done")
    agent = agent_of(client, tool, middleware=[ToolRateLimitMiddleware(limiter)])
    server.halt()
    ran = asyncio.create_task(run(agent))
    for _ in range(500):
        await asyncio.sleep(0)
    assert len(client.requests) == 1
    events.append("ticked")
    server.resume()
    await ran
    assert events[0] == "ticked"
    assert sorted(events[1:]) == ["c1", "c2", "c3"]


@both_ways
@pytest.mark.skipif(
    not hasattr(agent_framework, "MiddlewareFailure"), reason="came with agent-framework 1.15"
)
async def test_r35_raise_ends_the_run_with_the_stores_error(*, stream: bool) -> None:
    limiter = Limiter({"lookup": hourly(6)}, store=NOBODY, on_store_error="raise")
    tool = recorded()
    client = OfflineChatClient(calls("lookup", 2), "done")
    agent = agent_of(client, tool, middleware=[ToolRateLimitMiddleware(limiter)])
    with pytest.raises(agent_framework.MiddlewareFailure) as caught:
        await run(agent, stream=stream)
    assert isinstance(caught.value.__cause__, StoreError)
    assert tool.started == []
    assert len(client.requests) == 1


@both_ways
async def test_r35_deny_tells_the_model_and_the_tool_does_not_run(*, stream: bool) -> None:
    limiter = Limiter({"lookup": hourly(6)}, store=NOBODY, on_store_error="deny")
    tool = recorded()
    client = OfflineChatClient(calls("lookup", 2), "done")
    agent = agent_of(client, tool, middleware=[ToolRateLimitMiddleware(limiter)])
    await run(agent, stream=stream)
    assert tool.started == []
    found = rejections(last_results(client))
    assert [rejection["reason"] for rejection in found.values()] == ["store"] * 2
    assert_answered(client.requests[-1])


@pytest.mark.parametrize(("policy", "ran"), [("local", 2), ("admit", 3)])
async def test_r35_local_and_admit_go_on(policy: Any, ran: int) -> None:
    limiter = Limiter({"lookup": hourly(2)}, store=NOBODY, on_store_error=policy)
    tool = recorded()
    client = OfflineChatClient(calls("lookup", 3), "done")
    agent = agent_of(client, tool, middleware=[ToolRateLimitMiddleware(limiter)])
    await run(agent)
    assert len(tool.started) == ran


async def test_a_closed_limiter_runs_no_tool(redis_url: str) -> None:
    limiter = Limiter({"lookup": hourly(2)}, store=redis_url)
    tool = recorded()
    client = OfflineChatClient(calls("lookup", 3), "done")
    agent = agent_of(client, tool, middleware=[ToolRateLimitMiddleware(limiter)])
    limiter.close()
    if hasattr(agent_framework, "MiddlewareFailure"):
        with pytest.raises(agent_framework.MiddlewareFailure):
            await run(agent)
    else:
        await run(agent)
    assert tool.started == []


def test_metrics_tell_of_each_store_and_never_go_down(server: Server) -> None:
    def seen() -> list[dict[str, float]]:
        found = []
        for observe in (
            _telemetry._observe_requests,
            _telemetry._observe_time,
            _telemetry._observe_alone,
            _telemetry._observe_down,
        ):
            points = {}
            for point in observe(CallbackOptions()):
                attributes = dict(point.attributes or {})
                if attributes.pop("store") == f"redis://127.0.0.1:{server.port}/0":
                    points[str(attributes.get("outcome", ""))] = point.value
            found.append(points)
        return found

    url = server.url(timeout="100ms")
    limiter = Limiter({"lookup": hourly(5)}, store=url)
    while not server.clients():
        assert limiter.try_acquire("lookup", cost=1) is not None
    asked, time, alone, down = seen()
    assert asked["answered"] >= 1
    assert (asked["failed"], alone[""], down[""]) == (0, 0, 0)
    assert time[""] > 0
    server.stop()
    while not seen()[3][""]:
        assert limiter.try_acquire("lookup") is not None
    assert limiter.try_acquire("lookup") is not None
    down_by_now = seen()
    assert down_by_now[2][""] >= 1
    del limiter
    assert seen() == [*down_by_now[:3], {"": 0}]
    Limiter({"lookup": hourly(5)}, store=url).close()
    assert seen() == [*down_by_now[:3], {"": 0}]
