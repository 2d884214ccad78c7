# What an upstream says in a conversation, as far as it counts: which response began and ended, what it used, and how
# much of it has come. All else goes through unread.

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from gateway.upstreams.wire.errors import UpstreamError
from gateway.upstreams.wire.reading import count_of
from protocol.decoding import NOT_JSON
from protocol.usage import Usage

CREATED, DONE, ERROR = "response.created", "response.done", "error"
SAID = tuple(f"response.{what}.delta" for what in ("output_text", "output_audio_transcript", "function_call_arguments"))
SPOKEN = "response.output_audio.delta"
COMPLETED = ("completed", "incomplete")  # how a response ends that was made to its end


class Head(Struct, frozen=True):
    """What tells events apart. ``delta`` is a piece of an answer, ``response`` what began or ended."""

    type: str
    response_id: str | None = None
    delta: Raw | UnsetType = UNSET
    response: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


class Fault(Struct, frozen=True):
    """An error, and the event of the client that it is about."""

    event_id: str | None = None


class _Kinds(Struct, frozen=True):
    text_tokens: float | None = None
    audio_tokens: float | None = None
    image_tokens: float | None = None


class _InputDetails(_Kinds, frozen=True):
    cached_tokens: float | None = None
    cached_tokens_details: _Kinds | None = None


class _Usage(Struct, frozen=True):
    input_tokens: float | None = None
    output_tokens: float | None = None
    input_token_details: _InputDetails | None = None
    output_token_details: _Kinds | None = None


class Response(Struct, frozen=True):
    """A response that began or ended."""

    id: str
    status: str | None = None
    usage: _Usage | None = None

    @property
    def counted(self) -> Usage | None:
        """What it used, where its upstream told."""
        told = self.usage
        if told is None or told.input_tokens is None or told.output_tokens is None:
            return None
        heard, said = told.input_token_details or _InputDetails(), told.output_token_details or _Kinds()
        kept = heard.cached_tokens_details or _Kinds()
        return Usage(
            input_tokens=count_of(told.input_tokens) or 0,
            output_tokens=count_of(told.output_tokens) or 0,
            cached_input_tokens=count_of(heard.cached_tokens) or 0,
            audio_input_tokens=count_of(heard.audio_tokens) or 0,
            cached_audio_tokens=count_of(kept.audio_tokens) or 0,
            image_input_tokens=count_of(heard.image_tokens) or 0,
            cached_image_tokens=count_of(kept.image_tokens) or 0,
            audio_output_tokens=count_of(said.audio_tokens) or 0,
        )


def read_head(message: bytes) -> Head:
    """Return what an event is. Raises UpstreamError for what is none."""
    return _read(message, Head)


def response_in(head: Head) -> Response:
    """Return the response that an event tells of. Raises UpstreamError."""
    return _read(bytes(head.response) if head.response else b"", Response)


def fault_in(head: Head) -> Fault:
    """Return the error that an event tells. Raises UpstreamError."""
    return _read(bytes(head.error) if head.error else b"{}", Fault)


def _read(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except NOT_JSON as exc:
        raise UpstreamError("The upstream says what is no event.", outcome="nonsense") from exc
