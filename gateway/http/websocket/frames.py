# What goes over a WebSocket: a client's `response.create`, which is the body of a response besides a few fields of its
# own, and what a stream of events and its errors become as messages.

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from protocol.errors import BadRequest, ServiceError, invalid_value

CREATE = "response.create"
STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
UNTOLD = (b"content-type", b"content-length", b"cache-control", b"connection", b"x-accel-buffering")  # headers


class Create(Struct, frozen=True):
    """The fields of a message by which it is handled; the pipeline reads all others."""

    type: str
    stream_id: str | None = None
    generate: bool | None = None
    idempotency_key: str | None = None
    previous_response_id: str | None = None
    stream: Literal[True] | UnsetType = UNSET
    background: Literal[False] | None = None


RIGHT = {
    "$.stream": ("stream", "is always true over a WebSocket: leave it out"),
    "$.background": ("background", "is not for a WebSocket: leave it out, or POST to /v1/responses"),
    "$.generate": ("generate", "must be true or false"),
    "$.stream_id": ("stream_id", "must be a text"),
    "$.idempotency_key": ("idempotency_key", "must be a text"),
    "$.previous_response_id": ("previous_response_id", "must be a text"),
}


def read_create(message: bytes) -> tuple[Create, bytes]:
    """Return what a client asks, and the body of the request that it makes. Raises BadRequest."""
    try:
        asked = msgspec.json.decode(message, type=Create)
    except msgspec.ValidationError as exc:
        place = re.search(r"\$\.\w+", str(exc))
        if place is not None and place[0] in RIGHT:
            raise invalid_value(*RIGHT[place[0]]) from exc
        raise _unknown_type() from exc
    except msgspec.DecodeError as exc:
        words = f"The message is not valid JSON: {exc}."
        raise BadRequest(words, code="invalid_json") from exc
    if asked.type != CREATE:
        raise _unknown_type()
    if asked.stream_id is not None and STREAM_ID.fullmatch(asked.stream_id) is None:
        words = "'stream_id' is 1 to 256 letters, digits, underscores, hyphens and periods."
        raise BadRequest(words, param="stream_id", code="invalid_stream_id")
    if asked.stream is True:
        return asked, message
    return asked, b'{"stream":true,' + message.lstrip()[1:]


def _unknown_type() -> BadRequest:
    return BadRequest(f"A message is an object of the type '{CREATE}', with the body of a response.", param="type")


class EventReader:
    """Cuts a stream of events into what each says."""

    def __init__(self) -> None:
        self._begun = b""

    def read(self, piece: bytes) -> Iterable[bytes]:
        """Yield the JSON of every event that has ended."""
        *events, self._begun = (self._begun + piece).split(b"\n\n")
        for event in events:
            _, mark, data = event.rpartition(b"\ndata: ")
            if mark:  # else it is a comment
                yield data


def kind_of(data: bytes) -> bytes:
    """Return the type of an event, which is what it says first."""
    return data[len(b'{"type":"') :].partition(b'"')[0]


def with_fields(data: bytes, **fields: Any) -> bytes:
    """Return the JSON of an object with more fields before its own, those that are not ``None``."""
    told = {name: value for name, value in fields.items() if value is not None}
    return msgspec.json.encode(told)[:-1] + b"," + data[1:] if told else data


def told_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers of an answer as its first message tells them."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers if name not in UNTOLD}


def error_message(error: ServiceError) -> bytes:
    """Return the message that tells of an error which no request had."""
    return refusal_message(error.status, msgspec.json.encode(error.body()))


def refusal_message(status: int, body: bytes) -> bytes:
    """Return the message for a request that was refused with a status and a body of JSON."""
    return b'{"type":"error","status":%d,' % status + body[1:]
