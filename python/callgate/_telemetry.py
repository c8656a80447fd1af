"""What OpenTelemetry sees of decisions and of Redis stores. Needs `opentelemetry-api`, which agent frameworks bring.

Decisions are counted in the extension and read when metrics are collected, so that an admission
costs no call here. The instruments are made once, from the API's proxies: a provider that
the application sets later is found all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions, Observation

from callgate._callgate import Decision, StoreCounts, __version__, decision_counts, store_counts

_logger = logging.getLogger("callgate")
_tracer = trace.get_tracer("callgate", __version__)


def _observe(_options: CallbackOptions) -> Iterator[Observation]:
    for tool, limit, outcome, count in decision_counts():
        attributes = {"tool": tool, "outcome": outcome}
        if limit is not None:
            attributes["limit"] = limit
        yield Observation(count, attributes)


def _observe_requests(_options: CallbackOptions) -> Iterator[Observation]:
    for store, counts in store_counts():
        yield Observation(counts.answered, {"store": store, "outcome": "answered"})
        yield Observation(counts.failed, {"store": store, "outcome": "failed"})


def _of_stores(read: Callable[[StoreCounts], float]) -> Callable[..., Iterator[Observation]]:
    """Observes one number of each store."""

    def observe(_options: CallbackOptions) -> Iterator[Observation]:
        for store, counts in store_counts():
            yield Observation(read(counts), {"store": store})

    return observe


_observe_time = _of_stores(lambda counts: counts.seconds)
_observe_alone = _of_stores(lambda counts: counts.alone)
_observe_down = _of_stores(lambda counts: int(counts.is_down))

_meter = metrics.get_meter("callgate", __version__)
_meter.create_observable_counter(
    "callgate.decisions",
    callbacks=[_observe],
    unit="{decision}",
    description="Decisions on calls of limited tools in this process.",
)
_meter.create_observable_counter(
    "callgate.store.requests",
    callbacks=[_observe_requests],
    unit="{request}",
    description="Requests to Redis stores that were answered, or failed, in this process.",
)
_meter.create_observable_counter(
    "callgate.store.time",
    callbacks=[_observe_time],
    unit="s",
    description="How long the requests took that were answered.",
)
_meter.create_observable_counter(
    "callgate.store.decisions_alone",
    callbacks=[_observe_alone],
    unit="{decision}",
    description="Decisions that were made without a store, since it failed.",
)
_meter.create_observable_gauge(
    "callgate.store.down",
    callbacks=[_observe_down],
    description="1 where a store is known to be down, and is not asked; else 0.",
)


def record_rejection(decision: Decision, call_id: str | None) -> None:
    """Puts a span into the current trace, where the call that did not run has none.

    Args:
        decision: The decision that rejected the call, or would have in earnest.
        call_id: The model's id of the call, where the framework tells.
    """
    attributes: dict[str, str | float | bool] = {
        "gen_ai.tool.name": decision.tool,
        "callgate.limit": decision.limit or "",
        "callgate.reason": decision.reason or "",
    }
    if decision.admitted:
        attributes["callgate.dry_run"] = True
    if call_id is not None:
        attributes["gen_ai.tool.call.id"] = call_id
    if decision.retry_after is not None:
        attributes["callgate.retry_after"] = decision.retry_after
    try:
        _tracer.start_span("callgate.rejected", attributes=attributes).end()
    except Exception:
        # The application's samplers and processors run in there; what they do is not the call's fault.
        _logger.exception("The span of a rejected call could not be recorded")
