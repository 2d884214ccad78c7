# Prepared answers for load: the same bytes as the scripted upstream's own, made once per kind of request. What is
# measured behind it is then the gateway and not the upstream.

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from msgspec import Struct

from tests.support.openai_answers import Answer, answer_chat, answer_completion
from tests.support.upstream_acts import encode
from tests.support.upstream_http import HttpConnection, HttpRequest
from tests.support.upstream_scripts import Script, parse_script


class _Options(Struct):
    include_usage: bool = False


class _Asked(Struct):
    model: str
    stream: bool = False
    stream_options: _Options | None = None


class Prepared(Struct, frozen=True):
    """An answer as it goes over the wire: pieces that are sent one by one, ``pace`` seconds apart."""

    pieces: tuple[bytes, ...]
    latency: float
    pace: float


class PreparedAnswers:
    """Answers chat and plain completions by the script in the model's name (or the default), without faults."""

    def __init__(self, default: Script) -> None:
        self._default = default
        self._known: dict[tuple[str, str, bool, bool], Prepared] = {}
        self._decoder = msgspec.json.Decoder(_Asked)

    async def answer(self, request: HttpRequest, connection: HttpConnection) -> None:
        """Send the answer; each streamed event is a write of its own, as from a real server."""
        asked = self._decoder.decode(request.body)
        with_usage = asked.stream_options is not None and asked.stream_options.include_usage
        key = (request.path, asked.model, asked.stream, with_usage)
        prepared = self._known.get(key)
        if prepared is None:
            prepared = self._known[key] = self._prepare(request.path, request.body)
        if prepared.latency:
            await asyncio.sleep(prepared.latency)
        for place, piece in enumerate(prepared.pieces):
            if place and prepared.pace:
                await asyncio.sleep(prepared.pace)
            connection.write_raw(piece)

    def _prepare(self, path: str, raw: bytes) -> Prepared:
        body: dict[str, Any] = msgspec.json.decode(raw)
        _, _, text = body["model"].partition(":")
        script = parse_script(text) if text else self._default
        make = answer_chat if path == "/v1/chat/completions" else answer_completion
        answer = make(body, script, 0)
        if not body.get("stream"):
            data = encode(answer.whole())
            return Prepared((_head("application/json", f"content-length: {len(data)}") + data,), script.latency, 0.0)
        head = _head("text/event-stream; charset=utf-8", "transfer-encoding: chunked")
        events = [answer.event(chunk) for chunk, _ in answer.chunks()]
        chunks = [b"%x\r\n%b\r\n" % (len(event), event) for event in [*events, Answer.done]]
        # The head goes with the role, the last three events (finish, usage, [DONE]) go together: so do OpenAI's.
        tail = b"".join(chunks[-2 - bool(answer.request.get("stream_options")) :]) + b"0\r\n\r\n"
        middle = chunks[1 : -2 - bool(answer.request.get("stream_options"))]
        return Prepared((head + chunks[0], *middle, tail), script.latency, script.pace)


def _head(content_type: str, body: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"content-type: {content_type}", body, "x-request-id: req_prepared", "", ""]
    return "\r\n".join(lines).encode()
