# The answer to a call that runs in the background: its response as it is queued, or its stream, which any gateway can
# give again.

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from gateway.calls.call import Call
from gateway.calls.hooks import KeepEnding
from gateway.dialects.endpoint import ReplyWriter
from gateway.dialects.responses_writer import ResponsesWriter
from gateway.http.inference_port import InferencePort, Keep, OpenReply
from gateway.http.reply_response import JSON, ReplyResponse
from gateway.http.stream_sender import StreamSender
from gateway.idempotency.stored_answers import StoredAnswer
from gateway.stored_responses.background import BackgroundResponses, Run
from gateway.stored_responses.event_log import EventLog
from protocol.errors import BadRequest, ServiceError
from protocol.serving.leaving import ended_when_client_leaves
from protocol.sse import encode_event


class BackgroundResponse(ReplyResponse):
    """Has a call run in the background, and says so: an ASGI app that a route handler returns."""

    def __init__(
        self, backgrounds: BackgroundResponses, inference: InferencePort, call: Call, writer: ReplyWriter
    ) -> None:
        assert isinstance(writer, ResponsesWriter)
        self._events = EventLog(writer)
        super().__init__(inference, call, self._events)
        self._backgrounds = backgrounds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer once the call may run. A key stands for the response: asked again, the same one is told."""
        self._scope, call = scope, self._call
        if call.idempotency_key is not None:
            if call.streams:
                words = "Listen by GET with 'stream=true': leave 'stream' out where an Idempotency-Key comes."
                raise BadRequest(words, param="stream")
            await self._inference.answer_once(call, self._start_and_keep, self._write_error, scope, send)
        elif call.streams:
            team_id = call.caller.team.id
            self._backgrounds.refuse_listener(team_id)
            queued = await self._start(call)
            listen = ListenResponse(self._backgrounds, self._inference.keep_alive, team_id, queued["id"], -1)
            await listen(scope, receive, send)
        else:
            answer = _told(await self._start(call))
            await _send(answer, send)

    async def _start_and_keep(self, call: Call, send: Any, keep: Keep) -> None:
        answer = _told(await self._start(call))
        await keep(answer, None)
        await _send(answer, send)

    async def _start(self, call: Call) -> dict[str, Any]:
        # Also where its client wants no stream: others may listen later.
        call = replace(
            call,
            request=replace(call.request, stream=True),
            idempotency_key=None,
            is_background=True,
        )
        return await self._backgrounds.start(call, self._events, self._work)

    async def _work(self, run: Run, keep: KeepEnding[OpenReply]) -> None:
        try:
            await self._stream(run.call, run.events, _to_no_client, run, keep)
        except ServiceError as exc:
            if run.is_awaited:  # its client gets the error itself
                raise
            self._write_error(exc)


class ListenResponse:
    """Sends what a stream says, from wherever its listener begins."""

    def __init__(
        self, backgrounds: BackgroundResponses, keep_alive: float, team_id: str, response_id: str, after: int
    ) -> None:
        self._backgrounds = backgrounds
        self._keep_alive = keep_alive  # seconds of silence until a comment
        self._team_id, self._response_id, self._after = team_id, response_id, after

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it until its end, or until its client leaves."""
        sender = StreamSender(send, self._keep_alive)
        with self._backgrounds.listening(self._team_id), ended_when_client_leaves(scope, receive):
            try:
                await sender.begin([])
                async for events in self._backgrounds.listen(self._team_id, self._response_id, self._after):
                    await sender.send(events)
                await sender.end()
            except ServiceError as exc:
                told = {"type": "error", "code": exc.code, "message": exc.message, "param": None}
                await sender.send(encode_event(msgspec.json.encode(told), b"error"), is_last=True)
            finally:
                sender.close()


async def _to_no_client(message: dict[str, Any]) -> None:
    """Send nothing: what runs in the background is read from where it is stored."""


def _told(response: dict[str, Any]) -> StoredAnswer:
    body = msgspec.json.encode(response)
    return StoredAnswer(200, ((b"content-type", JSON), (b"content-length", b"%d" % len(body))), body)


async def _send(answer: StoredAnswer, send: Any) -> None:
    await send({"type": "http.response.start", "status": answer.status, "headers": list(answer.headers)})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})
