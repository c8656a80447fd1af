"""What OpenTelemetry sees of decisions. Needs `opentelemetry-api`, which agent frameworks bring.

Decisions are counted in the extension and read when metrics are collected, so that an admission
costs no call here. The instruments are made once, from the API's proxies: a provider that
the application sets later is found all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions, Observation

from callgate._callgate import Decision, __version__, decision_counts

_logger = logging.getLogger("callgate")
_tracer = trace.get_tracer("callgate", __version__)


def _observe(_options: CallbackOptions) -> Iterator[Observation]:
    for tool, limit, outcome, count in decision_counts():
        attributes = {"tool": tool, "outcome": outcome}
        if limit is not None:
            attributes["limit"] = limit
        yield Observation(count, attributes)


metrics.get_meter("callgate", __version__).create_observable_counter(
    "callgate.decisions",
    callbacks=[_observe],
    unit="{decision}",
    description="Decisions on calls of limited tools in this process.",
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
