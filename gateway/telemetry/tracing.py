# Calls as OpenTelemetry spans: made of what the usage record knows when a call has ended, so that a running one costs
# nothing more. Names are those of the GenAI conventions where they have one. A trace tells what a row of the ledger
# tells, never what was said. How spans reach a collector is trace_export.py's business.

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes, AttributeValue

from billing.core.money import to_text
from billing.core.records import CACHED, CHARGED, UsageRecord
from gateway.calls.call import Call
from gateway.calls.hooks import ReplyHook
from router.catalog.targets import Target

if TYPE_CHECKING:
    from gateway.telemetry.trace_export import TraceExport

OPERATIONS = dict.fromkeys(("chat.completions", "messages", "responses", "responses.compact"), "chat") | {
    "completions": "text_completion"
}

_traceparents = TraceContextTextMapPropagator()


class Tracer:
    """Makes spans of calls that have ended, ``share`` of those that come without a trace, and has ``export`` send them.

    Close it: what was told last is sent then.
    """

    def __init__(self, export: TraceExport, share: float) -> None:
        self._export = export
        self._share = share
        self._loop = asyncio.get_running_loop()

    def watch(self, call: Call, target: Target) -> ReplyHook:
        """Watch how a reply ends."""
        return _Noted(partial(self.note, call))

    def note(self, call: Call, record: UsageRecord) -> None:
        """Tell of a call that has ended, if it is among those that are traced: when its last bytes have left."""
        parent = read_traceparent(call.traceparent)
        if is_traced(parent, record.request_id, self._share):
            self._loop.call_soon(self.tell, record, parent)

    def tell(self, record: UsageRecord, parent: Context) -> None:
        """Make the span of a call, inside ``parent`` or in a trace with the request's id, and those of its parts.

        Attempts stand one behind the other as they were made; the pauses between them are not known.
        """
        self._export.trace_id = int(record.request_id.replace("-", ""), 16)
        at = record.created_at
        whole = self._begin(_name(record), SpanKind.SERVER, at, parent, _facts(record))
        inside = trace.set_span_in_context(whole, Context())
        if record.queue_ms:
            waiting = self._begin("queue", SpanKind.INTERNAL, at, inside)
            at += record.queue_ms / 1000
            waiting.end(_nanoseconds(at))
        for attempt in record.attempts:
            facts = {"tollgate.target": attempt.target, "tollgate.outcome": attempt.outcome}
            asking = self._begin(f"attempt {attempt.target}", SpanKind.CLIENT, at, inside, facts)
            is_ok = attempt.outcome in ("ok", CACHED)
            asking.set_status(StatusCode.OK if is_ok else Status(StatusCode.ERROR, attempt.outcome))
            at += attempt.ms / 1000
            asking.end(_nanoseconds(at))
        whole.set_status(StatusCode.OK if record.status in CHARGED else StatusCode.ERROR)
        whole.end(_nanoseconds(record.created_at + record.total_ms / 1000))

    async def close(self) -> None:
        """Send what is left, as far as it goes in a few seconds."""
        await asyncio.sleep(0)  # what was noted last is told
        await self._export.close()

    def _begin(self, name: str, kind: SpanKind, at: float, context: Context, facts: Attributes = None) -> Span:
        return self._export.tracer.start_span(name, context, kind, facts, start_time=_nanoseconds(at))


class _Noted(ReplyHook):
    def __init__(self, note: Any) -> None:
        self._note = note

    def close(self, record: UsageRecord) -> None:
        self._note(record)


def read_traceparent(traceparent: str | None) -> Context:
    """Return the caller's span that a W3C traceparent names; an empty context for none, or one that makes no sense."""
    return _traceparents.extract({"traceparent": traceparent}, Context()) if traceparent else Context()


def is_traced(parent: Context, request_id: str, share: float) -> bool:
    """Whether a call is traced: as its caller has decided, else by a draw that its id makes."""
    caller = trace.get_current_span(parent).get_span_context()
    if caller.is_valid:
        return caller.trace_flags.sampled
    return int(request_id[-8:], 16) / 2**32 < share


def _name(record: UsageRecord) -> str:
    return f"{OPERATIONS.get(record.endpoint, record.endpoint)} {record.model_asked}"


def _facts(record: UsageRecord) -> Attributes:
    facts: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": OPERATIONS.get(record.endpoint, record.endpoint),
        "gen_ai.provider.name": record.provider,
        "gen_ai.request.model": record.model_asked,
        "gen_ai.response.model": record.model_used,
        "gen_ai.usage.input_tokens": record.input_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "tollgate.request_id": record.request_id,
        "tollgate.team": record.team_id,
        "tollgate.key": record.key_id,
        "tollgate.tier": record.tier,
        "tollgate.status": record.status.value,
        "tollgate.route_reason": record.route_reason,
        "tollgate.cost_usd": to_text(record.cost_nanousd),
        "tollgate.first_token_ms": record.first_token_ms,
    }
    return {key: fact for key, fact in facts.items() if fact is not None}


def _nanoseconds(at: float) -> int:
    return round(at * 1e9)
