# What is kept of a call whose team wants its contents kept: what was asked, as a policy let it out, and what its client
# got. Gathered while the reply passes, encoded and sealed behind it.

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from billing.core.records import Status, UsageRecord
from gateway.calls.accumulate import Collector
from gateway.calls.call import Call
from gateway.calls.hooks import ReplyHook
from gateway.storage.encryption import Sealer
from protocol.chat import ChatReply
from protocol.completions import CompletionReply
from protocol.embeddings import EmbeddingReply, RerankReply
from protocol.events import Delta
from protocol.inference import WholeReply
from protocol.media.audio import SpeechRequest, TranscriptionReply
from protocol.media.images import ImageReply, ImageRequest

LONGEST = 1024 * 1024  # bytes of a request, and characters of an answer, that are kept; of longer ones neither
ROW, PIECE = 2_000, 64  # bytes of memory that a call takes, and each piece of a stream, beside what is said
NUMBER = 20  # digits of one of a vector's


class Contents(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a row holds, as JSON. A recording or a picture that came as an upload is not a part of it."""

    endpoint: str  # as gateway.dialects.table names it
    request: Raw | None = None  # in its caller's dialect where that has a form of its own; null: it is too long
    answer: Raw | None = None  # whole, as a chat's or a completion's choices have it; null: none came, or too long
    status: str


class Gathered(Struct, eq=False, kw_only=True):
    """The contents of one call as the process has them: values that nothing changes any more."""

    team_id: str
    request_id: str
    endpoint: str
    created_at: float  # unix seconds
    status: str
    asked: Struct | None  # None: it is too long
    answer: Collector | WholeReply | None
    weight: int  # about how many bytes of memory all of it takes

    def sealed(self, sealer: Sealer) -> bytes:
        """Return what its row holds: made small first, because sealed bytes compress no more."""
        answer = self.answer.reply() if isinstance(self.answer, Collector) else self.answer
        said = Contents(endpoint=self.endpoint, request=_within(self.asked), answer=_within(answer), status=self.status)
        return sealer.seal(zlib.compress(msgspec.json.encode(said), 1), label_of(self.team_id, self.request_id))


def gathered(call: Call, status: str, answer: Collector | WholeReply | None = None, weight: int = 0) -> Gathered:
    """Return what is kept of a call, without what else a call holds, such as its upload. ``weight``: of the answer."""
    asked = None if call.size > LONGEST else call.request if call.native is None else call.native
    return Gathered(
        team_id=call.caller.team.id,
        request_id=call.request_id,
        endpoint=call.endpoint,
        created_at=call.created_at,
        status=status,
        asked=asked,
        answer=answer,
        weight=ROW + (0 if asked is None else call.size) + weight,
    )


def opened(sealer: Sealer, team_id: str, request_id: str, sealed: bytes) -> dict[str, Any]:
    """Return what a row holds, as JSON's values. Raises Unsealable, zlib.error or MsgspecError."""
    plain = zlib.decompress(sealer.unseal(sealed, label_of(team_id, request_id)))
    found = msgspec.json.decode(plain, type=dict[str, Any])
    return {name: found.get(name) for name in Contents.__struct_fields__}


def label_of(team_id: str, request_id: str) -> str:
    """Return the place that contents are sealed into: they open for no other call."""
    return f"{team_id}\n{request_id}"


class Keeper(ReplyHook):
    """Gathers one reply as its client gets it, and has it kept when it has ended."""

    def __init__(self, call: Call, keep: Callable[[Gathered], None]) -> None:
        self._call, self._keep = call, keep
        self._answer: Collector | WholeReply | None = None
        self._may_gather = not isinstance(call.request, SpeechRequest | ImageRequest)
        self._size = self._pieces = 0

    def delta(self, delta: Delta) -> Sequence[Delta]:
        """Gather, and change nothing."""
        if self._may_gather:
            if not isinstance(self._answer, Collector):
                self._answer = Collector(self._call.request)
            self._answer.add(delta)
            self._pieces += 1
            self._size += len(delta.text) + len(delta.reasoning) + len(delta.refusal)
            self._size += sum([len(each.arguments) for each in delta.tool_calls])
            self._size += 0 if delta.logprobs is None else len(bytes(delta.logprobs))
            if self._size > LONGEST:
                self._answer, self._may_gather = None, False
        return (delta,)

    async def whole(self, whole: WholeReply) -> WholeReply:
        """Gather a reply that came whole."""
        self._size, kept = _size_of(whole), whole
        if isinstance(whole, ChatReply):
            kept = whole.without_sound()
        self._answer = kept if self._size <= LONGEST else None
        return whole

    def close(self, record: UsageRecord) -> None:
        """Have kept what there is: of a reply that did not end well what its client has of a stream."""
        parts = (Status.INTERRUPTED, Status.SUPERSEDED) if self._call.streams else ()
        answer = self._answer if record.status in (Status.ANSWERED, *parts) else None
        weight = 0 if answer is None else self._size + PIECE * self._pieces
        self._keep(gathered(self._call, record.status, answer, weight))


def _size_of(whole: WholeReply) -> int:
    """Return about how many bytes a whole reply is as JSON: to write out a thousand vectors takes long."""
    match whole:
        case ChatReply(choices=choices):
            size = sum(map(len, map(bytes, (whole.told or {}).values())))
            for choice in choices:
                message = choice.message
                transcript = None if message.audio is None else message.audio.transcript
                said = (message.content, message.reasoning_content, message.refusal, transcript)
                size += sum(len(text or "") for text in said) + len(bytes(choice.logprobs or b""))
                size += sum(len(call.function.arguments) for call in message.tool_calls or ())
            return size
        case CompletionReply(choices=texts):
            return sum(len(text.text) + len(bytes(text.logprobs or b"")) for text in texts)
        case EmbeddingReply(vectors=vectors):
            return sum(len(vector) * (1 if isinstance(vector, str) else NUMBER) for vector in vectors)
        case RerankReply(results=results):
            return len(results) * 3 * NUMBER
        case ImageReply(images=images):
            return sum(len(image.b64_json or "") for image in images)
        case TranscriptionReply():
            return len(whole.text) + len(bytes(whole.told))


def _within(value: Struct | None) -> Raw | None:
    encoded = b"" if value is None else msgspec.json.encode(value)
    return Raw(encoded) if 0 < len(encoded) <= 2 * LONGEST else None
