# The response to an inference call: it runs the whole call, so that it ends it when the client leaves, and it closes
# what it opened whatever happens.

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from gpu_backend.server.client.engine_client import EngineClient
from gpu_backend.server.client.errors import EngineFailed
from gpu_backend.server.front import Front
from gpu_backend.server.generation import Generation, Job
from gpu_backend.server.reply import Piece, join_replies
from gpu_backend.server.requests.transfer import as_params
from gpu_backend.server.wire import Answer, Choice, UsageBody, encode
from gpu_backend.step.messages import LoadReport
from protocol.chat import ChatRequest
from protocol.completions import CompletionRequest
from protocol.errors import ServiceError
from protocol.serving.leaving import ended_when_client_leaves
from protocol.sse import DONE, encode_event
from protocol.usage import CACHED_TOKENS, PROMPT_TOKENS

log = logging.getLogger("gpu_backend")

SILENCE = 1.0  # seconds of silence until a stream says that the engine lives
RawHeaders = Sequence[tuple[bytes, bytes]]  # as ASGI has them
ALIVE = b": alive\n\n"  # a comment: readers of events skip it


class AnswerWriter(Protocol):
    """How one route writes its replies. One object per call; it may keep what a stream needs to remember."""

    envelope: Envelope

    def whole_choice(self, reply: Piece) -> Choice:
        """Return what a reply is in a plain answer."""

    def choices(self, piece: Piece) -> Sequence[Choice]:
        """Return what a piece of a reply becomes in a stream, a chunk each."""


class Envelope:
    """What all answers and chunks of one call have alike: id, time, model, and whether its usage was asked for.

    ``whole`` and ``chunk`` are OpenAI's names of their ``object``.
    """

    def __init__(
        self, front: Front, body: ChatRequest | CompletionRequest, prefix: str, *, whole: str, chunk: str
    ) -> None:
        self._whole, self._chunk = whole, chunk
        options = body.stream_options
        self.shows_usage = bool(options and options.include_usage)
        self.keeps_telling = self.shows_usage and bool(options and options.continuous_usage_stats)
        self._common: dict[str, Any] = {
            "id": f"{prefix}-{front.new_id()}",
            "created": int(front.now()),
            "model": body.model,
            "system_fingerprint": front.checkpoint.fingerprint,
        }

    def whole(
        self, choices: Sequence[Choice], usage: UsageBody, transfer: dict[str, Any] | UnsetType | None = UNSET
    ) -> bytes:
        """Return a whole answer; ``transfer`` is what the engine that goes on with it is to be told."""
        answer = Answer(object=self._whole, choices=choices, usage=usage, kv_transfer_params=transfer, **self._common)
        return encode(answer)

    def chunk(self, choice: Choice, so_far: UsageBody | None = None) -> bytes:
        """Return a chunk with one choice: its usage is null where a later chunk will have one, unless told so far."""
        usage = so_far if self.shows_usage else UNSET
        return encode(Answer(object=self._chunk, choices=(choice,), usage=usage, **self._common))

    def usage_chunk(self, usage: UsageBody) -> bytes:
        """Return the chunk that holds nothing but the usage."""
        return encode(Answer(object=self._chunk, choices=(), usage=usage, **self._common))


class InferenceResponse:
    """Answers ``job`` by ``writer``: an ASGI app that a route handler returns."""

    def __init__(self, front: Front, job: Job, writer: AnswerWriter, request_id: str, *, streams: bool) -> None:
        self._front = front
        self._job = job
        self._writer = writer
        self._request_id = request_id
        self._streams = streams

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Run the job until its last byte is sent, or until its client leaves."""
        with ended_when_client_leaves(scope, receive):
            generation = self._front.generate(self._job, self._front.new_id())
            answer = self._stream if self._streams else self._send_whole
            try:
                await answer(generation, send, scope["headers"])
            finally:
                generation.close()

    async def _send_whole(self, generation: Generation, send: Any, headers: RawHeaders) -> None:
        pieces = [piece async for some in generation.pieces() for piece in some]
        choices = [self._writer.whole_choice(reply) for reply in join_replies(pieces, self._job.num_replies)]
        asked = self._job.transfer
        transfer = as_params(generation.held) if asked is not None and asked.do_remote_decode else UNSET
        body = self._writer.envelope.whole(choices, generation.usage(), transfer)
        await send_json(send, body, self._request_id, load_headers(headers, self._front.engine.load))

    async def _stream(self, generation: Generation, send: Any, asked: RawHeaders) -> None:
        async with aclosing(generation.pieces()) as pieces:
            first = await anext(pieces)  # before the status goes out: a failure may still have its own
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            headers += load_headers(asked, self._front.engine.load)
            headers += prompt_headers(generation.usage())
            await send({"type": "http.response.start", "status": 200, "headers": _headers(headers, self._request_id)})
            keep_alive = StreamKeepAlive(send, self._front.engine)
            try:
                envelope = self._writer.envelope
                await self._send_pieces(first, generation, send)
                async for some in pieces:
                    keep_alive.note_sent()
                    await self._send_pieces(some, generation, send)
                usage = encode_event(envelope.usage_chunk(generation.usage())) if envelope.shows_usage else b""
                await _send_more(send, usage + DONE)
            except Exception as exc:
                # Too late for another status. What is not meant for clients is logged, and named without detail.
                if not isinstance(exc, ServiceError):
                    log.exception("a stream broke off (request %s)", self._request_id)
                error = exc if isinstance(exc, ServiceError) else EngineFailed("The reply broke off inside the engine.")
                self._front.metrics.count_failure(error.status)
                await _send_more(send, encode_event(encode(error.body())))
            finally:
                keep_alive.stop()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_pieces(self, pieces: list[Piece], generation: Generation, send: Any) -> None:
        envelope = self._writer.envelope
        so_far = generation.usage() if envelope.keeps_telling else None
        events = [
            encode_event(envelope.chunk(choice, so_far)) for piece in pieces for choice in self._writer.choices(piece)
        ]
        if events:
            await _send_more(send, b"".join(events))


class StreamKeepAlive:
    """Says a comment on a stream that is silent while the engine's process still reports: its reply is not lost.

    A reader of the stream can tell within seconds a replica that stands still from one that is busy. Stop it.
    """

    def __init__(self, send: Any, engine: EngineClient) -> None:
        self._send = send
        self._engine = engine
        self._heard = engine.num_heard
        self._loop = asyncio.get_running_loop()
        self._said = self._loop.time()
        self._saying: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(SILENCE, self._ring)

    def note_sent(self) -> None:
        """The stream said something of its own."""
        self._said = self._loop.time()

    def stop(self) -> None:
        """Say nothing more."""
        self._timer.cancel()
        if self._saying is not None:
            self._saying.cancel()

    def _ring(self) -> None:
        is_silent = self._loop.time() - self._said >= SILENCE
        if is_silent and self._engine.num_heard != self._heard and (self._saying is None or self._saying.done()):
            self._saying = self._loop.create_task(_send_more(self._send, ALIVE))
        self._heard = self._engine.num_heard
        self._timer = self._loop.call_later(SILENCE, self._ring)


async def send_json(send: Any, body: bytes, request_id: str, more: RawHeaders = ()) -> None:
    """Send a whole JSON answer, with these headers too."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *more]
    await send({"type": "http.response.start", "status": 200, "headers": _headers(headers, request_id)})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _send_more(send: Any, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _headers(headers: list[tuple[bytes, bytes]], request_id: str) -> list[tuple[bytes, bytes]]:
    return [*headers, (b"x-request-id", request_id.encode())]


def prompt_headers(usage: UsageBody) -> RawHeaders:
    """Return what a stream's headers tell of its prompt: a gateway says it before the usage at the end."""
    return [
        (PROMPT_TOKENS.encode(), b"%d" % usage.prompt_tokens),
        (CACHED_TOKENS.encode(), b"%d" % usage.cached_tokens),
    ]


ASKS, TELLS = b"endpoint-load-metrics-format", b"endpoint-load-metrics"


# Open Request Cost Aggregation (ORCA, the specification of Envoy and gRPC, "In-band reporting"), with the metrics that
# vLLM names in it, for balancers that ask for it in an answer's headers.
def load_headers(headers: Iterable[tuple[bytes, bytes]], load: LoadReport | None) -> list[tuple[bytes, bytes]]:
    """Return the header that a request's ``headers`` ask for: as text, as JSON, or none; another format is ignored."""
    asked = next((value.strip().lower() for name, value in headers if name == ASKS), b"")
    if load is None or asked not in (b"text", b"json"):
        return []
    metrics = {
        "kv_cache_usage_perc": load.kv_utilization,
        "num_requests_waiting": float(load.queue_depth),
        "num_requests_running": float(load.running),
    }
    if asked == b"json":
        return [(TELLS, b"JSON " + msgspec.json.encode({"named_metrics": metrics}))]
    return [(TELLS, b"TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items()).encode())]
