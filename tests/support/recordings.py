# Answers that providers really gave, as cassettes have them: other makers', and those of `tollgate doctor --live`. Each
# is read by its format, whole or streamed.

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct

from gateway.calls.accumulate import Collector
from gateway.upstreams.registry import FORMATS, RESPONSES
from gateway.upstreams.wire.errors import UpstreamFailure
from protocol.chat import ChatReply, ChatRequest
from protocol.events import Delta, UsageReport
from protocol.usage import Usage
from tests.wire.traffic import read_stream

ASKED = ChatRequest(model="m", messages=())
ENDS = {
    "openai": "/chat/completions",
    "responses": "/responses",
    "anthropic": "/v1/messages",
    "gemini": "enerateContent",
}
WIRES = FORMATS | {"responses": RESPONSES}
GZIP = b"\x1f\x8b"


class Recorded(Struct, frozen=True):
    """One answer, and where it stands."""

    file: str
    host: str
    status: int
    body: bytes

    @property
    def is_stream(self) -> bool:
        """Whether it came as events."""
        return self.body.lstrip()[:5] in (b"data:", b"event", b": OPE", b": kee")


def recorded_in(file: Path, name: str) -> Iterator[Recorded]:
    """Yield a cassette's answers in a format."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for one in (yaml.load(file.read_text(), loader) or {}).get("interactions", ()):
        asked, answer = one.get("request") or {}, one.get("response") or {}
        url = str(asked.get("uri", ""))
        if not url.partition("?")[0].endswith(ENDS[name]) or "status" not in answer:
            continue
        body = answer.get("body") or {}
        said = body.get("string") or ""
        data = json.dumps(answer["parsed_body"]) if "parsed_body" in answer else said
        packed = data if isinstance(data, bytes) else data.encode()
        plain = gzip.decompress(packed) if packed.startswith(GZIP) else packed
        yield Recorded(file.name, url.split("/")[2], answer["status"]["code"], plain)


def read_recorded(name: str, one: Recorded) -> tuple[ChatReply, Usage | None]:
    """Return what an answer says, and its count. A stream means the same in single bytes. Raises UpstreamFailure."""
    wire = WIRES[name]
    if not one.is_stream:
        reply, usage = wire.read_reply(ASKED, one.body)
        assert isinstance(reply, ChatReply)
        return reply, usage
    events, outcome = read_stream(wire.open_events(ASKED), [one.body])
    pieces = [one.body[place : place + 1] for place in range(len(one.body))]
    assert read_stream(wire.open_events(ASKED), pieces) == (events, outcome), one.file
    if outcome is not None:
        raise UpstreamFailure("…", outcome=outcome)
    collector = Collector(ASKED)
    for event in events:
        if isinstance(event, Delta):
            collector.add(event)
    reply = collector.reply()
    assert isinstance(reply, ChatReply)
    return reply, next((event.usage for event in reversed(events) if isinstance(event, UsageReport)), None)


def told_wrongly(name: str, one: Recorded) -> Any:
    """Return what is wrong with how a failing answer is read, if anything: the caller's fault is the caller's 400."""
    failure = WIRES[name].read_error(one.status, {}, one.body)
    right = {401: "refused_key", 403: "refused_key", 404: "not_found", 429: "rate_limited"}.get(one.status, "refused")
    return None if failure.outcome == right else (failure.outcome, one)
