# The response that answers an inference call: it runs the whole call, so that it can end it when the client leaves,
# and it always closes its reply.

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from itertools import islice
from typing import Any
from urllib.parse import quote

import structlog

from gateway.calls.call import Call
from gateway.calls.hooks import Ending, KeepEnding
from gateway.dialects.endpoint import ReplyFacts, ReplyWriter
from gateway.dialects.responses_writer import ResponsesWriter
from gateway.dialects.table import BY_NAME
from gateway.http.inference_port import BeforeEnd, InferencePort, Keep, OpenReply
from gateway.http.stream_sender import EVENT_STREAM, StreamSender
from gateway.idempotency.stored_answers import LARGEST_KEPT, NOT_KEPT, StoredAnswer
from protocol.errors import ServiceError
from protocol.events import Event, ReplyEnd
from protocol.inference import WholeReply
from protocol.serving.leaving import Client, ended_when_client_leaves
from protocol.usage import Usage

log = structlog.get_logger()

JSON = b"application/json"
LONGEST_NAME, MOST_NAMES = 64, 32  # of fields that were left out, in the header that tells them


class ReplyResponse:
    """Answers ``call`` as ``writer`` writes it: an ASGI app that a route handler returns.

    This is the one way to answer an inference call: an Idempotency-Key is honoured here, whatever the route.
    """

    def __init__(
        self, inference: InferencePort, call: Call, writer: ReplyWriter, before_end: BeforeEnd | None = None
    ) -> None:
        self._inference = inference
        self._call = call
        self._writer = writer
        self._before_end = before_end  # what is done once the reply is whole, before its end is written
        self._scope: Any = None  # of the request, once it is answered

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Run the call until its last byte is sent, or until its client leaves; with a key, until its end."""
        self._scope, call = scope, self._call
        if call.streams and media_type_of(call) is None:  # other bytes have no words for it
            scope["state"]["write_error"] = self._write_error
        with ended_when_client_leaves(scope, receive) as client:
            if call.idempotency_key is None:
                await self._run(call, self._writer, send, client)
            else:
                await self._inference.answer_once(call, self._run_and_keep, self._write_error, scope, send)

    def _run(
        self,
        call: Call,
        writer: ReplyWriter,
        send: Any,
        client: Client,
        keep_ending: KeepEnding[OpenReply] | None = None,
    ) -> Coroutine[Any, Any, None]:
        """Return what runs the call as its client wants it: in pieces, or whole."""
        run = self._stream if call.streams else self._send_whole
        return run(call, writer, send, client, keep_ending)

    async def _run_and_keep(self, call: Call, send: Any, keep: Keep) -> None:
        recorder = RecordingWriter(self._writer)

        async def keep_ending(reply: OpenReply, ending: Ending) -> None:
            if self._before_end is not None:
                await self._before_end(reply, ending)
            recorder.end(reply, ending)
            await keep(recorder.answer(reply), reply.record)

        await self._run(call, recorder, send, Client(), keep_ending)  # a Client that never leaves

    async def _send_whole(
        self, call: Call, writer: ReplyWriter, send: Any, client: Client, keep_ending: KeepEnding[OpenReply] | None
    ) -> None:
        self._inference.in_flight.inc()
        try:
            reply = await self._inference.answer(call, client, keep_ending)
            try:
                whole, usage = await reply.collect()
                if self._before_end is not None and keep_ending is None:
                    await self._before_end(reply, (whole, usage))
                body = writer.whole(reply, whole, usage)
                await send({"type": "http.response.start", "status": 200, "headers": answer_headers(reply, body)})
                await send({"type": "http.response.body", "body": body, "more_body": False})
            finally:
                _close_reply(reply, client)
        finally:
            self._inference.in_flight.dec()

    async def _stream(
        self, call: Call, writer: ReplyWriter, send: Any, client: Client, keep_ending: KeepEnding[OpenReply] | None
    ) -> None:
        sender = StreamSender(send, self._inference.keep_alive, media_type_of(call))
        self._inference.in_flight.inc()
        try:
            reply = await self._inference.answer(call, client, keep_ending)
            try:
                await sender.begin(reply_headers(reply))
                async for events in reply.pieces():
                    if self._before_end is not None and keep_ending is None and type(events[-1]) is ReplyEnd:
                        await self._before_end(reply, events)
                    if body := writer.pieces(reply, events):
                        await sender.send(body, is_last=type(events[-1]) is ReplyEnd)
            finally:
                _close_reply(reply, client)
        except ServiceError as exc:
            if not sender.has_begun:
                raise
            # Too late for another status: the stream itself says it, and ends without [DONE].
            if not (told := self._write_error(exc)):  # nothing can say so, and no end of the body pretends one
                return
            await sender.send(told)
        except Exception:
            if not sender.has_begun:
                raise
            log.exception("reply_failed", request_id=self._call.request_id)
            if not (told := self._write_error(ServiceError("The answer broke off inside the gateway."))):
                return
            await sender.send(told)
        finally:
            self._inference.in_flight.dec()
            sender.close()
        await sender.end()

    def _write_error(self, error: ServiceError) -> bytes:
        """Return the bytes that end a stream which was begun with 200; no error handler runs any more."""
        self._inference.note_refusal(self._scope, error)
        return self._writer.error(error)


class WarmUp:
    """Answers ``generate: false``: the request is read, checked and routed, and costs nothing. It counts as one."""

    def __init__(self, inference: InferencePort, call: Call, writer: ReplyWriter) -> None:
        assert isinstance(writer, ResponsesWriter)
        self._inference, self._call, self._writer = inference, call, writer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Say that the response is there, with nothing in it. Raises what would refuse the call."""
        limits = self._call.limit_headers(await self._inference.warm_up(self._call), self._call.created_at)
        headers = [*EVENT_STREAM, *((name.encode(), value.encode()) for name, value in limits.items())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self._writer.warm_up(), "more_body": False})


def _close_reply(reply: OpenReply, client: Client) -> None:
    """Close a reply by whichever way it ended."""
    if client.has_left:
        reply.abandon()
    reply.close()


class RecordingWriter:
    """A writer that stores what it wrote; it writes the end before the accounting closes, and sends it after."""

    def __init__(self, writer: ReplyWriter) -> None:
        self._writer = writer
        self._parts: list[bytes] = []
        self._size = 0  # bytes
        self._end = b""

    def end(self, reply: OpenReply, ending: Ending) -> None:
        """Write the end of the answer: the last events of a stream, or a plain answer's whole."""
        if isinstance(ending, list):
            self._end = self._remember(self._writer.pieces(reply, ending))
        else:
            assert isinstance(ending, tuple)
            whole, usage = ending
            self._end = self._remember(self._writer.whole(reply, whole, usage))

    def answer(self, reply: OpenReply) -> StoredAnswer:
        """Return all that was written, as it is kept, or ``NOT_KEPT`` if that is too long to be kept."""
        if self._size > LARGEST_KEPT:
            return NOT_KEPT
        body = b"".join(self._parts)
        headers = answer_headers(reply, None if reply.call.streams else body)
        # What was left of a limit then says nothing now.
        kept = [header for header in headers if b"-ratelimit-" not in header[0]]
        return StoredAnswer(200, tuple(kept), body)

    def whole(self, reply: ReplyFacts, whole: WholeReply, usage: Usage) -> bytes:
        """Return the body of a plain answer, as it was kept."""
        return self._end

    def pieces(self, reply: ReplyFacts, events: list[Event]) -> bytes:
        """Return the bytes of a stream that stand for events which came together."""
        is_end = type(events[-1]) is ReplyEnd
        return self._end if is_end else self._remember(self._writer.pieces(reply, events))

    def error(self, error: ServiceError) -> bytes:
        """Return the bytes that tell a client in mid-stream that its reply broke. Never kept."""
        return self._writer.error(error)

    def _remember(self, body: bytes) -> bytes:
        self._size += len(body)
        self._parts.append(body)
        if self._size > LARGEST_KEPT:
            self._parts.clear()
        return body


def answer_headers(reply: OpenReply, body: bytes | None = None) -> list[tuple[bytes, bytes]]:
    """Return the headers of a plain answer with ``body``, or of a stream."""
    if body is not None:
        media_type = media_type_of(reply.call)
        kind = JSON if media_type is None else media_type.encode()
        return [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *reply_headers(reply)]
    media_type = media_type_of(reply.call)
    return [*(EVENT_STREAM if media_type is None else [(b"content-type", media_type.encode())]), *reply_headers(reply)]


def media_type_of(call: Call) -> str | None:
    """Return what the answer to a call is, where it is neither JSON nor a stream of events."""
    return BY_NAME[call.endpoint].media_type(call.request)


def reply_headers(reply: OpenReply) -> list[tuple[bytes, bytes]]:
    """Return the headers that every answer to an inference call carries."""
    log, endpoint = reply.log, BY_NAME[reply.call.endpoint]
    ours = max(0.0, reply.first_token_seconds - log.waited - log.queued) * 1000
    headers = [
        (b"x-model-used", reply.target.model.name.encode()),
        (b"x-route-reason", reply.route.reason_at(reply.target).encode()),
        (b"x-tollgate-overhead-ms", b"%.3f" % ours),
        (b"x-cache", reply.cache.encode()),
    ]
    if reply.route.decision is not None:
        headers.append((b"x-route-score", b"%.4f" % reply.route.decision.score))
    if reply.dropped:
        headers.append((b"x-tollgate-dropped", names_of_fields(endpoint.names_of(reply.dropped))))
    if log.queued:
        headers.append((b"x-tollgate-queue-ms", b"%.3f" % (log.queued * 1000)))
    if (limit := set_limit(reply)) is not None:
        headers.append((b"x-tollgate-max-tokens", b"%d" % limit))
    limits = endpoint.limit_headers(reply.account.hold, reply.call.created_at)
    return headers + [(name.encode(), value.encode()) for name, value in limits.items()]


def set_limit(reply: OpenReply) -> int | None:
    """Return the output limit that the caller did not name: a budget's, or that of a model which says less."""
    asked, most = getattr(reply.call.request, "output_limit", None), reply.target.model.max_output
    return most if asked is not None and asked > most else reply.call.fitted_output


def names_of_fields(names: Iterable[str]) -> bytes:
    """Return names that callers may have made up as the value of a header, the first of very many."""
    told = [quote(name[:LONGEST_NAME], safe=".-_")[:LONGEST_NAME] for name in islice(dict.fromkeys(names), MOST_NAMES)]
    return ", ".join(told).encode()
