# A provider whose models hear and speak: OpenAI's Realtime API on the `websockets` package, in a thread, as tests
# script it. It answers a response as it is told to, and keeps all that it heard.

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

KEY = "sk-upstream"
# What a response of words uses, and one by voice: half of the prompt was heard, a part of that cached.
WORDS = {
    "total_tokens": 130,
    "input_tokens": 100,
    "output_tokens": 30,
    "input_token_details": {"text_tokens": 100, "audio_tokens": 0, "image_tokens": 0, "cached_tokens": 0},
    "output_token_details": {"text_tokens": 30, "audio_tokens": 0},
}
VOICE = {
    "total_tokens": 320,
    "input_tokens": 200,
    "output_tokens": 120,
    "input_token_details": {
        "text_tokens": 100,
        "audio_tokens": 100,
        "image_tokens": 0,
        "cached_tokens": 60,
        "cached_tokens_details": {"text_tokens": 20, "audio_tokens": 40, "image_tokens": 0},
    },
    "output_token_details": {"text_tokens": 20, "audio_tokens": 100},
}
SECOND = "A" * 64_000  # a second of sound, in base64: 16 bits at 24 kHz
SPEECH = "U1BFRUNI"  # sound after which the server itself begins a response


@dataclass(frozen=True)
class Answer:
    """How one response goes: ``words``, a ``call`` of a function or ``sound`` in pieces, and then its end. ``end`` is
    the status of the response; "waits" until it is cancelled, "cut", "refused", or "silent": none of it
    begins. ``follows``: with its end comes the next response, which the provider begins by itself."""

    words: tuple[str, ...] = ("Hello, ", "Ada.")
    sound: tuple[str, ...] = ()
    call: str = ""
    usage: dict[str, Any] | None = field(default_factory=lambda: WORDS)
    end: str = "completed"
    follows: bool = False


class ScriptedRealtime:
    """The provider. ``heard``: what clients said, over all connections in their order."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []
        self.asked: list[str] = []  # paths, with their queries
        self.closed: list[int | None] = []  # why clients closed
        self.refuses_with: int | None = None  # a status, for who connects
        self._answers: deque[Answer] = deque()
        self._server: Server = serve(self._talk, "127.0.0.1", 0, process_request=self._check, compression=None)
        self.url = f"http://127.0.0.1:{self._server.socket.getsockname()[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> ScriptedRealtime:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join(20)

    def forget(self) -> None:
        """Forget what was heard and scripted."""
        self._answers.clear()
        self.heard, self.asked, self.closed, self.refuses_with = [], [], [], None

    def script(self, *answers: Answer) -> None:
        """Answer the next responses so; those after them with words."""
        self._answers.extend(answers)

    def kinds(self) -> list[str]:
        """Return the types of what was heard."""
        return [event["type"] for event in self.heard]

    def _check(self, _: ServerConnection, request: Request) -> Response | None:
        self.asked.append(request.path)
        is_known = request.headers.get("authorization") == f"Bearer {KEY}" or request.headers.get("api-key") == KEY
        status = self.refuses_with or (None if is_known else 401)
        if status is None:
            return None
        error = {"error": {"message": "No.", "type": "invalid_request_error", "code": None, "param": None}}
        body = json.dumps(error).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        return Response(status, "No", _headers(headers), body)

    def _talk(self, socket: ServerConnection) -> None:
        closed = self.closed  # what ends after it was forgotten is not told to the next test
        with contextlib.suppress(ConnectionClosed):
            _Talk(self, socket).run()
        closed.append(None if socket.protocol.close_rcvd is None else socket.protocol.close_rcvd.code)

    def next_answer(self) -> Answer:
        """Return how the next response goes."""
        return self._answers.popleft() if self._answers else Answer()


def _headers(fields: dict[str, str]) -> Any:
    from websockets.datastructures import Headers

    return Headers(fields)


class _Talk:
    """One connection."""

    def __init__(self, server: ScriptedRealtime, socket: ServerConnection) -> None:
        self._server, self._socket = server, socket
        self._session: dict[str, Any] = {"type": "realtime", "object": "realtime.session", "id": "sess_1"}
        self._count = 0
        self._waiting: dict[str, Any] | None = None  # a response that does not end by itself
        self._unsent: list[bytes] = []
        self._is_holding = False  # what it says, to send it with what comes next

    def run(self) -> None:
        self._say("session.created", session=self._session)
        for message in self._socket:
            event = json.loads(message)
            self._server.heard.append(event)
            match event["type"]:
                case "session.update":
                    self._session |= event["session"]
                    self._say("session.updated", session=self._session)
                case "conversation.item.create":
                    self._say("conversation.item.added", item={"id": "item_1", **event["item"]}, previous_item_id=None)
                case "input_audio_buffer.append" if event["audio"] == SPEECH:
                    self._say("input_audio_buffer.speech_stopped", audio_end_ms=1000, item_id="item_2")
                    self._respond({})
                case "response.create":
                    self._respond(event)
                case "conversation.item.delete":  # here it ends the conversation
                    self._socket.close(1000, "It is over.")
                case "response.cancel" if self._waiting is not None:
                    self._end(self._waiting, "cancelled", WORDS)

    def _respond(self, event: dict[str, Any]) -> None:
        answer = self._server.next_answer()
        if answer.end == "silent":
            return
        if answer.end == "refused":
            error = {"type": "invalid_request_error", "code": "conversation_already_has_active_response"}
            self._say("error", error={**error, "message": "No.", "param": None, "event_id": event.get("event_id")})
            return
        self._count += 1
        response = {"id": f"resp_{self._count}", "object": "realtime.response", "output": [], "status": "in_progress"}
        self._say("response.created", response=response)
        place = {"response_id": response["id"], "item_id": "item_3", "output_index": 0}
        for call in filter(None, [answer.call]):
            self._say("response.function_call_arguments.delta", call_id="call_1", delta='{"city":', **place)
            self._say(
                "response.function_call_arguments.done",
                call_id="call_1",
                name=call,
                arguments='{"city":"Bern"}',
                **place,
            )
        for piece in answer.sound:
            self._say("response.output_audio.delta", content_index=0, delta=piece, **place)
        said = "response.output_audio_transcript.delta" if answer.sound else "response.output_text.delta"
        for piece in answer.words if not answer.call else ():
            self._say(said, content_index=0, delta=piece, **place)
        if answer.end == "waits":
            self._waiting, self._is_holding = response, False
            self._send()
        elif answer.end == "cut":
            self._socket.socket.shutdown(2)
        else:
            self._is_holding = answer.follows
            self._end(response, answer.end, answer.usage)
            if answer.follows:
                self._respond({})

    def _end(self, response: dict[str, Any], status: str, usage: dict[str, Any] | None) -> None:
        self._waiting = None
        self._say("response.done", response={**response, "status": status, "usage": usage})

    def _say(self, kind: str, **said: Any) -> None:
        self._count += 1
        self._unsent.append(json.dumps({"type": kind, "event_id": f"event_{self._count}", **said}).encode())
        if not self._is_holding:
            self._send()

    def _send(self) -> None:
        """Send what was said, before anything that the other side says meanwhile is read."""
        with self._socket.send_context():
            for message in self._unsent:
                self._socket.protocol.send_text(message)
        self._unsent.clear()
