"""What becomes of a rejected call: in each of the four forms, for the model and for programs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import agent_framework
import pytest
from agent_framework import (
    AgentSession,
    Content,
    FunctionInvocationContext,
    FunctionMiddleware,
    MiddlewareTermination,
)

from callgate import ConfigError, Decision, Limiter, RateLimitExceeded
from callgate.agent_framework import OnRejected, ToolRateLimitMiddleware
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

MESSAGE = "Rate limit exceeded for tool 'lookup'. Retry in 1 second."
CAN_RAISE = hasattr(agent_framework, "MiddlewareFailure")
"""Whether this version of the framework lets middleware end a run (1.15 and later)."""

raising = pytest.mark.skipif(not CAN_RAISE, reason="needs agent-framework-core 1.15 or later")


class Watch(FunctionMiddleware):
    """Notes what the middleware around the limiter sees of each call."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, dict[str, Any]]] = []

    async def process(self, context: FunctionInvocationContext, call_next: Any) -> None:
        await call_next()
        self.seen.append((context.result, context.metadata))


# --- as a result ---------------------------------------------------------------------------------


@both_ways
async def test_a_rejection_is_a_result_that_the_model_and_programs_can_read(
    clock: FakeClock, *, stream: bool
) -> None:
    lookup, watch = recorded(), Watch()
    limiter = ToolRateLimitMiddleware(limits(), clock=clock)
    client = OfflineChatClient(calls("lookup", 2), "done")
    response = await run(agent_of(client, lookup, middleware=[watch, limiter]), stream=stream)

    structured = {
        "tool": "lookup",
        "limit": "lookup",
        "reason": "rate",
        "remaining": 0,
        "retry_after": pytest.approx(1),
    }
    for messages in (response.messages, client.requests[-1]):
        found = results(messages)["c2"]
        assert found.result == MESSAGE
        assert found.exception is None
        assert rejections({"c2": found}) == {"c2": structured}
    assert response.text == "done"

    result, metadata = watch.seen[1]
    assert [str(content) for content in result] == [MESSAGE]
    decision = metadata["rate_limit"]
    assert isinstance(decision, Decision)
    assert not decision
    assert {name: getattr(decision, name) for name in structured} == structured
    assert "rate_limit" not in watch.seen[0][1]


@both_ways
async def test_the_structured_part_survives_into_the_stored_history_and_from_there_to_the_model(
    clock: FakeClock, *, stream: bool
) -> None:
    limiter = ToolRateLimitMiddleware(limits(), clock=clock)
    client = OfflineChatClient(calls("lookup", 2), "done")
    agent = agent_of(client, recorded(), middleware=[limiter])
    session = agent.create_session()
    await run(agent, stream=stream, session=session)

    stored = json.dumps(session.to_dict())
    restored = AgentSession.from_dict(json.loads(stored))
    later = OfflineChatClient("it was limited")
    await run(agent_of(later), "what happened?", stream=stream, session=restored)

    found = last_results(later)
    assert found["c1"].result == "lookup found c1"
    assert found["c2"].result == MESSAGE
    assert rejections(found) == {
        "c2": {
            "tool": "lookup",
            "limit": "lookup",
            "reason": "rate",
            "remaining": 0,
            "retry_after": pytest.approx(1),
        }
    }
    assert_answered(later.requests[-1])


async def never() -> None:
    """A tool that must not run."""
    raise AssertionError


async def test_r05_a_call_that_can_never_be_admitted_says_so(clock: FakeClock) -> None:
    limiting = ToolRateLimitMiddleware(limits(burst=3), cost=lambda _context: 4, clock=clock)
    context = FunctionInvocationContext(function=recorded().tool, arguments={"call": "c1"})
    await limiting.process(context, never)
    (content,) = context.result
    assert str(content) == (
        "Rate limit exceeded for tool 'lookup'. "
        "The call costs more than the limit can ever admit: do not retry it."
    )
    assert content.additional_properties["rate_limit"]["retry_after"] is None
    assert content.additional_properties["rate_limit"]["reason"] == "cost"


# --- ending the tool loop ------------------------------------------------------------------------


@both_ways
async def test_terminate_ends_the_tool_loop_with_the_usual_result(
    clock: FakeClock, *, stream: bool
) -> None:
    lookup = recorded()
    limiter = ToolRateLimitMiddleware(limits(burst=2), on_rejected="terminate", clock=clock)
    client = OfflineChatClient(calls("lookup", 4), "never said")
    response = await run(agent_of(client, lookup, middleware=[limiter]), stream=stream)

    assert len(client.requests) == 1
    assert len(lookup.started) == 2
    found = results(response.messages)
    assert set(found) == {"c1", "c2", "c3", "c4"}
    assert_answered(response.messages)
    refused = rejections(found)
    assert set(refused) == set(found) - set(lookup.started)
    for call in found:
        assert found[call].result == (MESSAGE if call in refused else f"lookup found {call}")
    assert "never said" not in response.text


async def test_terminate_leaves_calls_within_the_quota_alone(clock: FakeClock) -> None:
    limiter = ToolRateLimitMiddleware(limits(burst=2), on_rejected="terminate", clock=clock)
    client = OfflineChatClient(calls("lookup", 2), "done")
    response = await run(agent_of(client, recorded(), middleware=[limiter]))
    assert response.text == "done"


async def test_after_terminate_the_next_run_goes_on_from_the_stored_history(
    clock: FakeClock,
) -> None:
    limiter = ToolRateLimitMiddleware(limits(), on_rejected="terminate", clock=clock)
    client = OfflineChatClient(calls("lookup", 2), "all is well")
    agent = agent_of(client, recorded(), middleware=[limiter])
    session = agent.create_session()
    await run(agent, session=session)
    response = await run(agent, "go on", session=session)
    assert response.text == "all is well"
    assert_answered(client.requests[-1])
    assert set(rejections(last_results(client))) == {"c2"}


# --- ending the run ------------------------------------------------------------------------------


@pytest.mark.skipif(CAN_RAISE, reason="only where the framework cannot end a run")
def test_raise_is_refused_where_the_framework_would_swallow_it() -> None:
    with pytest.raises(ConfigError) as refused:
        ToolRateLimitMiddleware(limits(), on_rejected="raise")
    assert str(refused.value) == (
        "on_rejected must be 'result', 'terminate' or a callable with agent-framework-core "
        "below 1.15, got 'raise'"
    )


@raising
@both_ways
async def test_r35_raise_ends_the_run_with_the_decision(clock: FakeClock, *, stream: bool) -> None:
    lookup = recorded()
    limiter = ToolRateLimitMiddleware(limits(), on_rejected="raise", clock=clock)
    client = OfflineChatClient(calls("lookup", 1), calls("lookup", 1, "d"), "never said")
    with pytest.raises(agent_framework.MiddlewareFailure) as failed:
        await run(agent_of(client, lookup, middleware=[limiter]), stream=stream)

    assert str(failed.value) == MESSAGE
    cause = failed.value.__cause__
    assert isinstance(cause, RateLimitExceeded)
    assert str(cause) == MESSAGE
    assert cause.decision.tool == "lookup"
    assert cause.decision.retry_after == pytest.approx(1)
    assert lookup.started == ["c1"]
    assert len(client.requests) == 2


@raising
@both_ways
async def test_raise_cancels_the_calls_beside_it_whose_tokens_stay_spent(
    clock: FakeClock, *, stream: bool
) -> None:
    cancelled: list[str] = []

    async def never_end(call: str) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(call)
            raise

    lookup = recorded(act=never_end)
    limiter = ToolRateLimitMiddleware(limits(burst=3), on_rejected="raise", clock=clock)
    client = OfflineChatClient(calls("lookup", 4), "never said")
    with pytest.raises(agent_framework.MiddlewareFailure):
        await run(agent_of(client, lookup, middleware=[limiter]), stream=stream)

    assert sorted(cancelled) == sorted(lookup.started) == ["c1", "c2", "c3"]
    assert remaining(limiter) == 0
    clock.advance(1)
    assert remaining(limiter) == 1


@raising
async def test_raise_leaves_calls_within_the_quota_alone(clock: FakeClock) -> None:
    limiter = ToolRateLimitMiddleware(limits(burst=2), on_rejected="raise", clock=clock)
    client = OfflineChatClient(calls("lookup", 2), "done")
    response = await run(agent_of(client, recorded(), middleware=[limiter]))
    assert response.text == "done"


# --- in the user's words -------------------------------------------------------------------------


def answers(answer: Any, kind: str) -> tuple[OnRejected, list[Decision]]:
    """A plain or async callable that gives this answer, and what it is asked."""
    asked: list[Decision] = []

    def plain(context: FunctionInvocationContext, decision: Decision) -> Any:
        assert context.function.name == decision.tool
        assert context.metadata["rate_limit"] is decision
        assert str(context.result[0]) == MESSAGE
        asked.append(decision)
        return answer

    async def slow(context: FunctionInvocationContext, decision: Decision) -> Any:
        await asyncio.sleep(0)
        return plain(context, decision)

    return (plain if kind == "sync" else slow), asked


def items(*texts: str) -> list[Content]:
    """Contents that carry something for programs."""
    return [Content.from_text(text, additional_properties={"mine": text}) for text in texts]


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(
    ("answer", "texts", "mine"),
    [
        ("Wait a bit.", ["Wait a bit."], [None]),
        ("", [""], [None]),
        (items("Later.")[0], ["Later."], ["Later."]),
        (items("One.", "Two."), ["One.", "Two."], ["One.", "Two."]),
        ({"wait": 1, "ok": False}, ['{"wait": 1, "ok": false}'], [None]),
        (None, [MESSAGE], [None]),
    ],
    ids=["str", "empty", "Content", "list", "dict", "None"],
)
@both_ways
async def test_a_callable_words_the_rejection(
    answer: Any,
    texts: list[str],
    mine: list[str | None],
    kind: str,
    clock: FakeClock,
    *,
    stream: bool,
) -> None:
    lookup = recorded()
    on_rejected, asked = answers(answer, kind)
    limiter = ToolRateLimitMiddleware(limits(), on_rejected=on_rejected, clock=clock)
    client = OfflineChatClient(calls("lookup", 2), "done")
    response = await run(agent_of(client, lookup, middleware=[limiter]), stream=stream)

    assert response.text == "done"
    assert lookup.started == ["c1"]
    assert [decision.retry_after for decision in asked] == [pytest.approx(1)]
    found = last_results(client)
    assert list(found) == ["c1", "c2"]
    assert found["c2"].exception is None
    read = found["c2"].items or []
    assert [_as_json(item.text) for item in read] == [_as_json(text) for text in texts]
    assert [item.additional_properties.get("mine") for item in read] == mine
    assert (set(rejections(found)) == {"c2"}) is (answer is None)


def _as_json(text: str | None) -> Any:
    """A text, or what it says where it is JSON: spaces and order are the framework's."""
    try:
        return json.loads(text or "")
    except json.JSONDecodeError:
        return text


async def test_a_callable_may_set_the_result_itself(clock: FakeClock) -> None:
    def on_rejected(context: FunctionInvocationContext, decision: Decision) -> None:
        context.result = f"{decision.tool} is busy"

    limiter = ToolRateLimitMiddleware(limits(), on_rejected=on_rejected, clock=clock)
    client = OfflineChatClient(calls("lookup", 2), "done")
    await run(agent_of(client, recorded(), middleware=[limiter]))
    assert last_results(client)["c2"].result == "lookup is busy"


async def test_a_callable_is_not_asked_for_calls_within_the_quota(clock: FakeClock) -> None:
    on_rejected, asked = answers("never", "sync")
    limiter = ToolRateLimitMiddleware(limits(burst=2), on_rejected=on_rejected, clock=clock)
    client = OfflineChatClient(calls("lookup", 2), "done")
    await run(agent_of(client, recorded(), middleware=[limiter]))
    assert asked == []


@both_ways
async def test_r35_a_callable_that_raises_lets_no_call_through(
    clock: FakeClock, *, stream: bool
) -> None:
    def on_rejected(context: FunctionInvocationContext, decision: Decision) -> None:
        raise RuntimeError("secret of the wording")

    lookup, free = recorded(), recorded("free")
    limiter = ToolRateLimitMiddleware(limits(), on_rejected=on_rejected, clock=clock)
    client = OfflineChatClient([*calls("lookup", 2), *calls("free", 1, "f")], "done")
    response = await run(agent_of(client, lookup, free, middleware=[limiter]), stream=stream)

    # As any error of a tool: the model reads that it failed, and the run goes on.
    assert response.text == "done"
    assert lookup.started == ["c1"]
    assert free.started == ["f1"]
    found = last_results(client)
    assert list(found) == ["c1", "c2", "f1"]
    assert found["c2"].exception is not None
    assert "secret" not in str(found["c2"].result)


@both_ways
async def test_a_callable_may_end_the_tool_loop(clock: FakeClock, *, stream: bool) -> None:
    def on_rejected(context: FunctionInvocationContext, decision: Decision) -> None:
        raise MiddlewareTermination("enough")

    limiter = ToolRateLimitMiddleware(limits(), on_rejected=on_rejected, clock=clock)
    client = OfflineChatClient(calls("lookup", 2), "never said")
    response = await run(agent_of(client, recorded(), middleware=[limiter]), stream=stream)
    assert len(client.requests) == 1
    assert results(response.messages)["c2"].result == MESSAGE


# --- what is refused at construction -------------------------------------------------------------


@pytest.mark.parametrize(
    "on_rejected", ["", "Result", "ignore", None, 0, True, ["result"]], ids=repr
)
def test_an_unknown_form_is_refused(on_rejected: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        ToolRateLimitMiddleware(limits(), on_rejected=on_rejected)
    assert str(refused.value) == (
        f"on_rejected must be 'result', 'raise', 'terminate' or a callable, got {on_rejected!r}"
    )


@pytest.mark.parametrize(
    ("arguments", "named", "message"),
    [
        ((None,), {}, "limits must be a mapping of names to ToolRateLimit, got None"),
        *(
            (
                (path,),
                {},
                (
                    "limits must be a mapping of names to ToolRateLimit "
                    f"(Limiter.from_file reads a file), got {path!r}"
                ),
            )
            for path in ("limits.toml", Path("limits.toml"))
        ),
        (({"lookup": 2},), {}, "limit 'lookup' must be a ToolRateLimit, got 2"),
        (
            (limits(tool="crm_[ab]"),),
            {},
            (
                "name must be a tool's name or a pattern with * and ?, "
                "without spaces around it and without [, ], { or }, got 'crm_[ab]'"
            ),
        ),
        (
            (limits(),),
            {"clock": 5},
            "clock must be a callable that returns seconds as a float, got 5",
        ),
        (
            (Limiter(limits()),),
            {"clock": FakeClock()},
            "clock must be given to the Limiter where one is shared, got both",
        ),
        *(
            (
                (limits(),),
                {name: given},
                f"{name} must be a callable that takes the context, got {given!r}",
            )
            for name, given in [("fields", "tenant"), ("fields", {}), ("cost", 2), ("cost", True)]
        ),
    ],
    ids=[
        "none",
        "file",
        "path",
        "number",
        "name",
        "clock",
        "both",
        "text",
        "mapping",
        "cost",
        "bool",
    ],
)
def test_bad_limits_and_clocks_are_refused(
    arguments: tuple[Any, ...], named: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        ToolRateLimitMiddleware(*arguments, **named)
    assert str(refused.value) == message


@pytest.mark.parametrize("misspelt", ["on_reject", "field", "on_rejected_", "costs", "default"])
def test_a_misspelt_argument_is_a_type_error_that_names_it(misspelt: str) -> None:
    make: Any = ToolRateLimitMiddleware
    with pytest.raises(TypeError, match=misspelt):
        make(limits(), **{misspelt: "result"})
