"""What OpenTelemetry sees: a counter of decisions, and a span for each call that did not run.

Providers can be set once in a process, so most of this happens in programs of its own.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import agent_framework
import pytest
from agent_framework import FunctionInvocationContext
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from callgate import Limiter, ToolRateLimit, _telemetry
from callgate._callgate import decision_counts
from callgate.agent_framework import ToolRateLimitMiddleware
from tests.agent_framework.scripted import (
    OfflineChatClient,
    agent_of,
    calls,
    last_results,
    limits,
    recorded,
    rejections,
    run,
)
from tests.clocks import FakeClock
from tests.running import run_program

PROGRAMS = Path(__file__).parent / "programs"
CURRENT = hasattr(agent_framework, "MiddlewareFailure")
"""Whether this is agent-framework-core 1.15 or later."""


def point(tool: str, outcome: str, limit: str | None = None) -> str:
    """A point of the counter, as the program names it: these attributes, and no other."""
    named = {} if limit is None else {"limit": limit}
    return json.dumps({**named, "outcome": outcome, "tool": tool})


@pytest.mark.parametrize("provider_is_set", ["first", "last"])
def test_the_counter_of_decisions_is_right_whenever_the_provider_is_set(
    provider_is_set: str,
) -> None:
    steps: list[dict[str, Any]] = json.loads(run_program(PROGRAMS / "metrics.py", provider_is_set))
    for step in steps:
        assert step["instrument"] == {
            "name": "callgate.decisions",
            "description": "Decisions on calls of limited tools in this process.",
            "unit": "{decision}",
            "data": {"aggregation_temporality": 2, "is_monotonic": True},
        }
    once = {
        point("early", "admitted"): 1,
        point("lookup", "admitted"): 2,
        point("lookup", "rejected_rate", "lookup"): 1,
    }
    and_a_dear_one = {**once, point("lookup", "rejected_cost", "lookup"): 1}
    twice = {
        **and_a_dear_one,
        point("lookup", "admitted"): 4,
        point("lookup", "rejected_rate", "lookup"): 2,
    }
    assert [step["points"] for step in steps] == [once, and_a_dear_one, and_a_dear_one, twice]


def calls_of(limiter: ToolRateLimitMiddleware) -> list[str]:
    """The files of all Python functions that are called while the middleware handles one call."""
    called: list[str] = []
    context = FunctionInvocationContext(function=recorded().tool, arguments={"call": "c1"})

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            called.append(frame.f_code.co_filename)

    async def call_next() -> None:
        pass

    async def measured() -> None:
        sys.setprofile(profile)
        try:
            await limiter.process(context, call_next)
        finally:
            sys.setprofile(None)

    asyncio.run(measured())
    return called


def test_an_admission_calls_no_python_but_the_middleware_itself(clock: FakeClock) -> None:
    # With the system's clock, as in production: an injected one is a Python call.
    limiter = ToolRateLimitMiddleware(limits(rate=1e-6))
    front_end = str(Path(sys.modules[ToolRateLimitMiddleware.__module__].__file__ or ""))
    assert calls_of(limiter) == [front_end, __file__]
    # So that this could fail: a rejection does call telemetry.
    assert any("opentelemetry" in file for file in calls_of(limiter))


FORMS = ["result", "terminate", "callable"]


@pytest.mark.parametrize("way", ["run", "stream"])
@pytest.mark.parametrize("form", [*FORMS, "raise"] if CURRENT else FORMS)
def test_a_rejection_is_a_span_where_the_call_that_ran_has_one(form: str, way: str) -> None:
    said = json.loads(run_program(PROGRAMS / "traces.py", form, way))
    assert said["failed"] == ("MiddlewareFailure" if form == "raise" else None)
    spans = {span["name"]: span for span in said["spans"]}
    names = [span["name"] for span in said["spans"]]
    assert names.count("callgate.rejected") == 1
    assert names.count("execute_tool lookup") == 1

    rejected = spans["callgate.rejected"]
    call_id = {"gen_ai.tool.call.id": "c2"} if CURRENT else {}  # 1.0.0 tells middleware no ids.
    assert rejected["attributes"] == {
        "gen_ai.tool.name": "lookup",
        "callgate.limit": "lookup",
        "callgate.reason": "rate",
        "callgate.retry_after": 1.0,
        **call_id,
    }
    assert rejected["parent"] == spans["execute_tool lookup"]["parent"]
    if CURRENT or way == "run":
        assert rejected["parent"] == "invoke_agent tester"
        assert rejected["trace"] == spans["invoke_agent tester"]["trace"]
    else:
        # In streams, 1.0.0 puts no span at all under the agent's, not even its tools' own.
        assert rejected["parent"] is None


@pytest.mark.parametrize("way", ["run", "stream"])
def test_a_call_that_a_dry_run_lets_pass_has_a_span_that_says_so_beside_its_own(way: str) -> None:
    said = json.loads(run_program(PROGRAMS / "traces.py", "dry run", way))
    assert said["failed"] is None
    names = [span["name"] for span in said["spans"]]
    assert names.count("execute_tool lookup") == 2
    [overruled] = [span for span in said["spans"] if span["name"] == "callgate.rejected"]
    assert overruled["attributes"]["callgate.dry_run"] is True
    assert overruled["attributes"]["callgate.limit"] == "lookup"
    assert overruled["attributes"]["callgate.retry_after"] == 1.0


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("reason", "waits"),
    [("paused", {"callgate.retry_after": pytest.approx(6)}), ("concurrency", {})],
)
async def test_a_pause_and_too_many_at_once_are_counted_and_seen_by_their_names(
    reason: str,
    waits: dict[str, Any],
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    *,
    dry_run: bool,
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(_telemetry, "_tracer", provider.get_tracer("callgate"))
    # The counts belong to the process, and each of these is to begin at nothing.
    name = f"{reason}, dry run: {dry_run}"
    limit = ToolRateLimit(1, 10, max_concurrent=1 if reason == "concurrency" else None)
    limiter = Limiter({name: limit}, dry_run=dry_run, clock=clock)
    if reason == "paused":
        limiter.pause(name, 5)
    lookup = recorded(name, act=lambda _call: asyncio.sleep(0))
    client = OfflineChatClient(calls(name, 2), "done")
    await run(agent_of(client, lookup, middleware=[ToolRateLimitMiddleware(limiter)]))

    admitted = 1 if reason == "concurrency" else 0
    assert len(lookup.started) == (2 if dry_run else admitted)
    counted = {
        outcome: (limit, count) for tool, limit, outcome, count in decision_counts() if tool == name
    }
    outcome = f"{'would_reject' if dry_run else 'rejected'}_{reason}"
    assert counted == {
        outcome: (name, 2 - admitted),
        **({"admitted": (None, admitted)} if admitted else {}),
    }
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["callgate.rejected"] * (2 - admitted)
    attributes = dict(spans[-1].attributes or {})
    attributes.pop("gen_ai.tool.call.id", None)
    assert attributes == {
        "gen_ai.tool.name": name,
        "callgate.limit": name,
        "callgate.reason": reason,
        **({"callgate.dry_run": True} if dry_run else {}),
        **waits,
    }


async def test_a_call_that_waited_is_counted_once_as_what_became_of_it(clock: FakeClock) -> None:
    name = "one that waits"
    limits = {name: ToolRateLimit(1, 9, max_concurrent=1, max_wait=10)}
    lookup = recorded(name, act=lambda _call: asyncio.sleep(0))
    client = OfflineChatClient(calls(name, 3), "done")
    limiter = ToolRateLimitMiddleware(limits, clock=clock)
    await run(agent_of(client, lookup, middleware=[limiter, limiter]))
    counted = {outcome: count for tool, _, outcome, count in decision_counts() if tool == name}
    assert counted == {"admitted": 3}


class Broken(SpanProcessor):
    """A processor that fails, at the start of a span or at its end."""

    def __init__(self, where: str) -> None:
        self.where = where

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        if self.where == "start":
            raise RuntimeError(self.where)

    def on_end(self, span: ReadableSpan) -> None:
        if self.where == "end":
            raise RuntimeError(self.where)


@pytest.mark.parametrize("where", ["start", "end"])
async def test_a_broken_span_processor_changes_no_rejection(
    where: str,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Broken(where))
    monkeypatch.setattr(_telemetry, "_tracer", provider.get_tracer("callgate"))
    lookup = recorded()
    limiter = ToolRateLimitMiddleware(limits(), clock=clock)
    client = OfflineChatClient(calls("lookup", 2), "done")
    await run(agent_of(client, lookup, middleware=[limiter]))
    assert lookup.started == ["c1"]
    assert set(rejections(last_results(client))) == {"c2"}
    assert "The span of a rejected call could not be recorded" in caplog.text
