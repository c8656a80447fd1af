"""Agents in several processes on one quota, and what a model reads where the store cannot be asked."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from callgate import Limiter, ToolRateLimit
from callgate.agent_framework import ToolRateLimitMiddleware
from tests.running import forked

from .scripted import (
    OfflineChatClient,
    agent_of,
    assert_answered,
    calls,
    last_results,
    recorded,
    rejections,
    run,
)

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux"),
    # From 3.12 on Python warns of any fork of a process that has threads.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


@pytest.fixture
def url() -> Iterator[str]:
    """The URL of a store that nobody has made."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield f"shm:{name}/quota"


def started(url: str, count: int, limits: dict[str, ToolRateLimit]) -> list[str]:
    """Which calls of one turn ran, of an agent whose limiter is made for it."""
    limiter = Limiter(limits, store=url)
    tool = recorded()
    client = OfflineChatClient(calls("lookup", count), "done")
    agent = agent_of(client, tool, middleware=[ToolRateLimitMiddleware(limiter)])
    asyncio.run(run(agent))
    assert_answered(client.requests[-1])
    assert len(rejections(last_results(client))) == count - len(tool.started)
    return tool.started


def test_r37_agents_of_two_processes_share_one_quota_and_a_new_agent_brings_none(url: str) -> None:
    limits = {"lookup": ToolRateLimit.parse("1/h", 5)}
    assert started(url, 3, limits) == ["c1", "c2", "c3"]
    theirs = forked(lambda: json.dumps(started(url, 4, limits)), 20)
    assert json.loads(theirs) == ["c1", "c2"]
    assert started(url, 4, limits) == []


def test_two_middlewares_that_share_a_limiter_with_a_store_charge_a_call_once(url: str) -> None:
    limiter = Limiter({"lookup": ToolRateLimit.parse("1/h", 5)}, store=url)
    tool = recorded()
    client = OfflineChatClient(calls("lookup", 3), "done")
    twice = [ToolRateLimitMiddleware(limiter), ToolRateLimitMiddleware(limiter)]
    asyncio.run(run(agent_of(client, tool, middleware=twice)))
    assert tool.started == ["c1", "c2", "c3"]
    assert limiter.snapshot()["lookup"].remaining == 2


async def test_r35_where_the_store_cannot_be_asked_the_tool_does_not_run_and_the_model_reads_why(
    url: str,
) -> None:
    limit = ToolRateLimit.parse("1/h", 5)
    limits = {"lookup": limit, "all": ToolRateLimit(1, 5, tools="*")}
    limiter = Limiter(limits, store=url)
    tool = recorded()
    client = OfflineChatClient(calls("lookup", 1), "done")
    agent = agent_of(client, tool, middleware=[ToolRateLimitMiddleware(limiter)])
    # As a process leaves it that is stopped while it has the lock.
    file = os.open(Path(f"{url.removeprefix('shm:')}.v1"), os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        await run(agent)
    finally:
        os.close(file)
    assert tool.started == []
    found = last_results(client)
    said = "The rate limit of tool 'lookup' cannot be checked at the moment. Retry later."
    assert str(found["c1"].result) == said
    assert rejections(found)["c1"]["reason"] == "store"
    assert rejections(found)["c1"]["retry_after"] is None
    assert limiter.snapshot()["lookup"].remaining == 5
