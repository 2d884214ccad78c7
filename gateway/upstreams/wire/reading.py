# What every wire format reads alike: a stream of server-sent events, whatever is in them; counts; what failures mean,
# and how long to wait after them.

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from gateway.upstreams.wire.errors import UpstreamBusy, UpstreamError, UpstreamFailure, UpstreamRefused, UpstreamTooLong
from gateway.upstreams.wire.like_chunks import LikeChunks
from protocol.decoding import MAX_VALUES, NOT_JSON, has_more_values
from protocol.events import Event, ReplyEnd
from protocol.sse import EventReader, EventStreamTooLong

MOST_TOKENS = 2**31  # of one kind in one call
LONGEST_WAIT = 86_400.0  # seconds that an upstream may ask a client to wait
LONGEST_WORDS = 2_000  # characters of an upstream's refusal that its caller is told

OBJECTS = msgspec.json.Decoder(dict[str, Any])
_texts = msgspec.json.Decoder(str)
NOTHING = Raw()  # msgspec takes no union of Raw with None
MOST_OF_ERROR = 64 * 1024  # bytes of a failing answer that are decoded

T = TypeVar("T", bound=Struct)
D = TypeVar("D")


class SseEvents(ABC):
    """Reads one streamed reply that comes as server-sent events; a format says what each of them means.

    However the bytes are cut, the events are the same: what came before a fault is returned, and the fault waits in
    ``failure``. What comes after the terminal marker is left unread.
    """

    def __init__(self) -> None:
        self.failure: UpstreamFailure | None = None
        self._reader = EventReader()
        self._like = LikeChunks(self._read_event)
        self._is_done = False  # the terminal marker has come

    def feed(self, piece: bytes) -> list[Event]:
        """Take in bytes and return the deltas, the usage and the end that they complete."""
        events: list[Event] = []
        try:
            read_words = self._like.read
            for event in self._reader.feed(piece):
                if self._is_done:
                    break
                if (words := read_words(event.data)) is not None:
                    events.append(words)
                    continue
                known = len(events)
                self._read_event(event.data, events)
                if len(events) == known + 1:
                    self._like.learn(event.data, events[known])
        except EventStreamTooLong as exc:
            self.failure = UpstreamError("The upstream sent an event that is too long.", outcome="malformed")
            self.failure.__cause__ = exc
        except UpstreamFailure as exc:
            self.failure = exc
        if self.failure is not None and not events:
            raise self.failure
        return events

    def finish(self) -> list[Event]:
        """Return the end that a finish without the terminal marker stands for; refuse a stream cut before one."""
        if self._is_done:
            return []
        if not self._has_finished():
            raise UpstreamError("The upstream's answer was cut off.", outcome="cut")
        self._is_done = True
        return [ReplyEnd()]

    def _end(self, events: list[Event]) -> None:
        """Note the terminal marker. Raises UpstreamError when nothing has said why the reply ends."""
        if not self._has_reason():
            raise UpstreamError("The upstream ended its answer without a reason.", outcome="cut")
        self._is_done = True
        events.append(ReplyEnd())

    @abstractmethod
    def _read_event(self, data: bytes, events: list[Event]) -> None:
        """Add to ``events`` what one of the upstream's means. Raises UpstreamFailure."""

    @abstractmethod
    def _has_reason(self) -> bool:
        """Whether any choice has said why it ended."""

    def _has_finished(self) -> bool:
        """Whether every choice has."""
        return self._has_reason()


def decoded(
    data: bytes | Raw,
    decoder: msgspec.json.Decoder[D],
    fault: str = "The upstream's answer is not what its format promises.",
) -> D:
    """Return what an upstream sent. Raises UpstreamError, with ``fault`` as its words, for what is none."""
    try:
        return decoder.decode(data)
    except NOT_JSON as exc:
        raise UpstreamError(fault, outcome="malformed") from exc


def read_usage(said: Raw, shape: type[T]) -> T | None:
    """Return a reply's counts, or ``None`` where there are none or nonsense: an answer is not lost over its bill."""
    if said is NOTHING:
        return None
    try:
        return _decoder_of(shape).decode(said)
    except NOT_JSON:
        return None


@cache
def _decoder_of(shape: type[T]) -> msgspec.json.Decoder[T | None]:
    return msgspec.json.Decoder(shape | None)


def text_in(said: Raw) -> str | None:
    """Return a text that was said where anything may be, and anything else as nothing: it is never built."""
    data = bytes(said)
    try:
        return _texts.decode(data) if data.startswith(b'"') else None
    except NOT_JSON:
        return None


def object_in(said: Raw) -> str:
    """Return an object as JSON text, and an empty one, or anything else, as nothing. Raises UpstreamError."""
    data = bytes(said)
    if not data.startswith(b"{"):
        return ""
    try:
        found = None if has_more_values(data, MAX_VALUES) else msgspec.json.decode(data)
    except NOT_JSON:
        found = None
    if found is None:
        raise UpstreamError("The upstream sent a tool call that cannot be read.", outcome="malformed")
    return msgspec.json.encode(found).decode() if found else ""


def read_error_fields(body: bytes) -> dict[str, Any]:
    """Return the error object of a failing answer, with ``message`` a text, wherever a service puts it.

    ``{"error": {…}}`` as the dialects have it, ``{"error": "…"}``, the fields at the top, FastAPI's ``detail``.
    """
    try:
        said = msgspec.json.decode(body) if len(body) <= MOST_OF_ERROR else None
    except NOT_JSON:
        return {}
    if not isinstance(said, dict):
        return {}
    error = said.get("error", said)
    fields: dict[str, Any] = error if isinstance(error, dict) else {"message": error}
    message = fields.get("message") or fields.get("detail")
    if message is not None and not isinstance(message, str):
        message = msgspec.json.encode(message).decode()
    return fields | {"message": (message or "")[:LONGEST_WORDS]}


def read_refused_field(error: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return which field a failing answer names, and the code of its fault; ``None`` for each that it does not have.

    From OpenAI's ``param`` and ``code``, or the first place in FastAPI's ``detail``; a message is not searched.
    """
    match error.get("detail"):
        case [{"loc": ["body", *path] | [*path], "type": str(kind)}, *_]:
            return ".".join(map(str, path)), kind
    return text_of(error.get("param")), text_of(error.get("code"))


def usual_failure(
    status: int, headers: Mapping[str, str], message: str, *, code: str | None = None, param: str | None = None
) -> UpstreamFailure:
    """Return what a failing answer means wherever the dialects agree. ``code`` and ``param`` are for the caller."""
    match status:
        case 403 if not message and code is None:  # no API's error: a firewall in front may judge one caller's words
            return UpstreamError("The upstream refused the request without a reason.", outcome="forbidden")
        case 401 | 403:
            return UpstreamError("The upstream refused the gateway's own credentials.", outcome="refused_key")
        case 402:
            return UpstreamBusy("The gateway's own account at the upstream is used up.", outcome="spend_cap")
        case 404:  # our catalogue names a model that the upstream does not have: ours to mend, not the caller's
            return UpstreamError("The upstream knows no such model, or no such path.", outcome="not_found")
        case 429 if message.startswith("Request too large"):
            return UpstreamBusy("The request alone exceeds the upstream's rate limit.", outcome="too_large")
        case 429:
            return UpstreamBusy("The upstream's rate limit is reached.", retry_after=read_retry_after(headers))
        case 400 | 409 | 413 | 422:
            words = message or "The upstream refused the request."
            refused = UpstreamTooLong if code == UpstreamTooLong.code else UpstreamRefused
            return refused(words, status=413 if status == 413 else 400, code=code, param=param)
    wait = read_retry_after(headers)
    return UpstreamError(f"The upstream answered {status}.", outcome=f"status_{status}", retry_after=wait)


def text_of(value: object) -> str | None:
    """Return a text as it is, and anything else as nothing."""
    return value if isinstance(value, str) else None


class _Counted(Struct):
    input_tokens: float | None = None
    count: float | None = None  # as an engine says it


def read_count(body: bytes) -> int | None:
    """Return the count of a prompt's tokens that ``body`` holds, or ``None`` when it is none."""
    try:
        told = msgspec.json.decode(body, type=_Counted)
        return count_of(told.input_tokens if told.count is None else told.count)
    except NOT_JSON:
        return None


def count_of(number: float | None) -> int | None:
    """Return a count that fits the ledger, or ``None`` for what is none: negative, broken, absurd."""
    return int(number) if number is not None and 0 <= number < MOST_TOKENS and number == int(number) else None


def read_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that an upstream asks to wait, a day at the most, from any of the three ways to say so."""
    if (milliseconds := _read_seconds(headers.get("retry-after-ms", ""))) is not None:
        return min(milliseconds / 1000, LONGEST_WAIT)
    if (value := headers.get("retry-after")) is None:
        return None
    if (seconds := _read_seconds(value)) is not None:
        return min(seconds, LONGEST_WAIT)
    try:
        return min(max(0.0, parsedate_to_datetime(value).timestamp() - time.time()), LONGEST_WAIT)
    except (ValueError, OverflowError):
        return None


def _read_seconds(text: str) -> float | None:
    """Return a number of seconds that a call can wait for; neither words nor infinity are one."""
    try:
        number = float(text)
    except ValueError:
        return None
    return max(0.0, number) if math.isfinite(number) else None
