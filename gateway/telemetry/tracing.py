# Calls as OpenTelemetry traces: made of what the usage record knows when a call has ended, so that a running one costs
# nothing more, and sent behind it as OTLP over HTTP in JSON. Names are those of the GenAI conventions where they have
# one. A trace tells what a row of the ledger tells, never what was said.

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

import aiohttp
import msgspec
import structlog

from billing.money import to_text
from billing.records import CHARGED, UsageRecord
from gateway.answering.call import Call
from gateway.answering.hooks import ReplyHook
from gateway.settings import Tracing
from router.targets import Target

EVERY = 1.0  # seconds between two sendings
SEND_WITHIN = 5.0  # seconds
AT_ONCE = 50  # calls in one sending: two milliseconds of work
MOST_WAITING = 10_000  # calls; the oldest are dropped where a collector takes none
SERVER, CLIENT, INTERNAL = 2, 3, 1  # kinds of span
OK, ERROR = 1, 2
OPERATIONS = {"chat.completions": "chat", "messages": "chat", "completions": "text_completion"}
TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
NOWHERE = "0" * 32

log = structlog.get_logger(__name__)

Span = dict[str, Any]


class Tracer:
    """Notes calls that have ended and sends them to a collector. ``run`` sends, for ever; ``flush`` once more."""

    def __init__(self, settings: Tracing) -> None:
        self._url = settings.url.rstrip("/") + "/v1/traces"
        self._share = settings.share
        self._waiting: deque[tuple[UsageRecord, str | None]] = deque(maxlen=MOST_WAITING)
        self._dropped = 0  # calls, since the collector was last there
        self._is_away = False

    def watch(self, call: Call, target: Target) -> ReplyHook:
        """Watch how a reply ends."""
        return _Noted(partial(self.note, call))

    def note(self, call: Call, record: UsageRecord) -> None:
        """Keep a call that has ended, if it is among those that are traced."""
        if is_traced(call.traceparent, record.request_id, self._share):
            self._dropped += len(self._waiting) == MOST_WAITING
            self._waiting.append((record, call.traceparent))

    async def run(self) -> None:
        """Send what has ended, every second."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(SEND_WITHIN)) as session:
            while True:
                await asyncio.sleep(EVERY)
                while self._waiting and await self._send(session):
                    pass

    async def flush(self) -> None:
        """Send what is left, as far as it goes."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(SEND_WITHIN)) as session:
            while self._waiting and await self._send(session):
                pass

    async def _send(self, session: aiohttp.ClientSession) -> bool:
        """Send the oldest that wait, and return whether the collector took them or refused them for good."""
        batch = [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]
        body = msgspec.json.encode(export([span for one in batch for span in spans_of(*one)]))
        try:
            async with session.post(self._url, data=body, headers={"content-type": "application/json"}) as answer:
                await answer.read()
                if answer.status >= 500 or answer.status == 429:
                    raise ConnectionError(f"the collector answers {answer.status}")
        except (aiohttp.ClientError, OSError, TimeoutError) as exc:
            if not self._is_away:
                log.warning("traces_wait", error=repr(exc))
            self._is_away = True
            self._waiting.extendleft(reversed(batch[: MOST_WAITING - len(self._waiting)]))
            return False
        if answer.status >= 300:
            log.warning("traces_refused", calls=len(batch), status=answer.status)
        if self._is_away:
            log.info("traces_sent_again", dropped=self._dropped)
        self._is_away, self._dropped = False, 0
        return True


class _Noted(ReplyHook):
    def __init__(self, note: Any) -> None:
        self._note = note

    def close(self, record: UsageRecord) -> None:
        self._note(record)


def is_traced(traceparent: str | None, request_id: str, share: float) -> bool:
    """Whether a call is traced: as its caller has decided, else by a draw that its id makes."""
    if (parent := _parent(traceparent)) is not None:
        return bool(int(parent[2], 16) & 1)
    return int(request_id[-8:], 16) / 2**32 < share


def spans_of(record: UsageRecord, traceparent: str | None) -> list[Span]:
    """Return the span of a call, inside its caller's trace or in one that has the request's id, and those of its parts.

    Attempts stand one behind the other as they were made; the pauses between them are not known.
    """
    parent = _parent(traceparent)
    trace = parent[0] if parent else record.request_id.replace("-", "")
    ident, began = record.request_id.replace("-", "")[16:], record.created_at
    whole = _span(trace, ident, parent[1] if parent else "", _name(record), SERVER, began, record.total_ms)
    whole["attributes"] = _attributes(_facts(record))
    whole["status"] = {"code": OK if record.status in CHARGED else ERROR}
    spans, at = [whole], 0.0
    if record.queue_ms:
        spans.append(_span(trace, _child(ident, 1), ident, "queue", INTERNAL, began, record.queue_ms))
        at = record.queue_ms
    for number, attempt in enumerate(record.attempts, 2):
        name = f"attempt {attempt.target}"
        span = _span(trace, _child(ident, number), ident, name, CLIENT, began + at / 1000, attempt.ms)
        span["attributes"] = _attributes({"tollgate.target": attempt.target, "tollgate.outcome": attempt.outcome})
        span["status"] = {"code": OK if attempt.outcome == "ok" else ERROR, "message": attempt.outcome}
        spans.append(span)
        at += attempt.ms
    return spans


def export(spans: list[Span]) -> dict[str, Any]:
    """Return spans as a collector takes them."""
    resource = {"attributes": _attributes({"service.name": "tollgate"})}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {"name": "tollgate"}, "spans": spans}]}]}


def _parent(traceparent: str | None) -> tuple[str, str, str] | None:
    """Return trace, span and flags of a W3C traceparent; nothing for none, or one that makes no sense."""
    found = TRACEPARENT.fullmatch(traceparent.strip()) if traceparent else None
    if found is None or found[1] == NOWHERE or found[2] == NOWHERE[:16]:
        return None
    return found[1], found[2], found[3]


def _name(record: UsageRecord) -> str:
    return f"{OPERATIONS.get(record.endpoint, record.endpoint)} {record.model_asked}"


def _facts(record: UsageRecord) -> dict[str, Any]:
    return {
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


def _attributes(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    kinds = {str: "stringValue", int: "intValue", float: "doubleValue"}
    return [
        {"key": key, "value": {kinds[type(fact)]: str(fact) if type(fact) is int else fact}}
        for key, fact in facts.items()
        if fact is not None
    ]


def _span(trace: str, ident: str, parent: str, name: str, kind: int, began: float, ms: float) -> Span:
    start = round(began * 1e9)
    return {
        "traceId": trace,
        "spanId": ident,
        "parentSpanId": parent,
        "name": name,
        "kind": kind,
        "startTimeUnixNano": str(start),
        "endTimeUnixNano": str(start + round(ms * 1e6)),
    }


def _child(ident: str, number: int) -> str:
    return f"{(int(ident, 16) + number) % 2**64:016x}"
