# Answers as the cache keeps them: under which name, what of an answer, and how it is sealed into its place.

from __future__ import annotations

import hmac
import zlib
from collections.abc import Collection
from typing import Any

import msgspec
from msgspec import Struct

from gateway.calls.call import Call
from gateway.storage.encryption import Sealer, Unsealable
from protocol.chat import ChatReply, FinishReason
from protocol.completions import CompletionReply
from protocol.embeddings import EmbeddingReply, EmbeddingRequest, RerankReply, RerankRequest
from protocol.events import Delta, ReplyEnd, UsageReport
from protocol.inference import Generation, WholeReply
from protocol.usage import Usage
from router.catalog.targets import ModelSpec

HEAVY = 64 * 1024  # bytes; larger answers are packed outside the event loop

# What a request says of who asks and how its answer travels: that it is said tells requests apart, not what.
ASIDE = ("model", "user", "safety_identifier", "metadata", "prompt_cache_key", "store", "stream_options")


class Place(Struct, frozen=True):
    """Where an answer is kept: no other scope shares it, and nothing else that was asked has its name."""

    scope: str  # "team:ID", or "shared" of the teams that share their answers
    name: str  # 64 hex digits: HMAC-SHA-256 of what is asked


class KeptAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answer: the pieces of a stream, or one that came whole."""

    usage: Usage  # of the call that it was made for
    dropped: tuple[str, ...] = ()  # fields of the request that its upstream was not told
    pieces: tuple[str | Delta, ...] = ()  # a text is a delta of the first choice that says only that
    chat: ChatReply | None = None
    completion: CompletionReply | None = None
    embedding: EmbeddingReply | None = None
    rerank: RerankReply | None = None

    @property
    def whole(self) -> WholeReply | None:
        """The answer, where it came whole."""
        return self.chat or self.completion or self.embedding or self.rerank

    def events(self) -> list[Delta | UsageReport | ReplyEnd]:
        """Return the events of an answer that came in pieces; none of one that came whole."""
        if self.whole is not None:
            return []
        said = [Delta(text=piece) if isinstance(piece, str) else piece for piece in self.pieces]
        return [*said, UsageReport(self.usage), ReplyEnd()]


def is_repeatable(call: Call) -> bool:
    """Whether a model is asked for the likeliest answer: vectors, scores, or a temperature of 0. Unsaid it is 1."""
    if isinstance(call.request, Generation):
        return call.request.temperature == 0
    return isinstance(call.request, EmbeddingRequest | RerankRequest)


def may_keep(answer: KeptAnswer) -> bool:
    """Whether nothing is lost where an answer is kept: one in an API's own blocks cannot be read back."""
    chat = answer.chat
    return chat is None or not any(choice.message.blocks for choice in chat.choices)


def ran_hosted_tools(answer: KeptAnswer) -> bool:
    """Whether its upstream ran tools of its own: these may do something, or read what is one team's alone."""
    if (chat := answer.chat) is not None:
        return chat.used is not None
    said = (piece for piece in answer.pieces if isinstance(piece, Delta))
    return any(piece.used is not None or piece.server_block is not None for piece in said)


def calls_tools(answer: KeptAnswer) -> bool:
    """Whether an answer calls a tool."""
    if answer.chat is not None:
        return any(choice.message.tool_calls for choice in answer.chat.choices)
    return any(isinstance(piece, Delta) and piece.tool_calls for piece in answer.pieces)


def was_filtered(answer: KeptAnswer) -> bool:
    """Whether the upstream's content filter cut an answer short."""
    choices = answer.chat.choices if answer.chat is not None else answer.completion.choices if answer.completion else ()
    ends = [choice.finish_reason for choice in choices]
    ends += [piece.finish_reason for piece in answer.pieces if isinstance(piece, Delta) and piece.finish_reason]
    return FinishReason.CONTENT_FILTER in ends


def place_of(call: Call, model: ModelSpec, scope: str, pepper: str, redacts: Collection[str] = ()) -> Place:
    """Return where the answer of ``model`` to a call is kept. Whitespace and the order of keys don't matter, the number
    of digits, the dialect and whether it streams do. ``redacts``: the groups that are taken out of the answer."""
    asked = [_said(call.request), None if call.native is None else _said(call.native), dict(call.extra)]
    what = [scope, call.endpoint, model.name, model.upstream_model, *asked, *sorted(redacts)]
    canonical = msgspec.json.encode(what, order="deterministic")
    return Place(scope, hmac.digest(pepper.encode(), b"tollgate cache\0" + canonical, "sha256").hex())


def seal(sealer: Sealer, place: Place, answer: KeptAnswer) -> bytes:
    """Return an answer as Redis keeps it: made small first, because sealed bytes compress no more."""
    return sealer.seal(zlib.compress(msgspec.json.encode(answer), 1), _label(place))


def unseal(sealer: Sealer, place: Place, sealed: bytes) -> KeptAnswer | None:
    """Return the answer that was sealed, ``None`` where it was changed, moved, or is not ours."""
    try:
        return msgspec.json.decode(zlib.decompress(sealer.unseal(sealed, _label(place))), type=KeptAnswer)
    except (Unsealable, zlib.error, msgspec.MsgspecError):
        return None


def _said(request: Struct) -> dict[str, Any]:
    said: dict[str, Any] = msgspec.to_builtins(request)
    return {name: name in ASIDE or value for name, value in said.items() if value is not None}


def _label(place: Place) -> str:
    return f"{place.scope}\n{place.name}"
