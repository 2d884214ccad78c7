# Answers as they are kept for requests with the same Idempotency-Key: what they are, where they belong, and how
# they are sealed into that place.

from __future__ import annotations

import zlib

import msgspec
import structlog
from msgspec import Struct

from gateway.core.errors import StoredAnswerUnreadable
from gateway.storage.encryption import Sealer, Unsealable
from protocol.serving.off_loop import in_parallel

LARGEST_KEPT = 16 * 1024 * 1024  # bytes; a longer answer passes through, and only that it was given is kept
HEAVY = 256 * 1024  # bytes; larger answers are packed outside the event loop

log = structlog.get_logger(__name__)


class Place(Struct, frozen=True):
    """Where a call and its answer are kept: no other team and no other endpoint shares it."""

    team_id: str
    endpoint: str
    key: str


class Claim(Struct, frozen=True):
    """A call that one gateway runs, or has run. A gateway that takes it over has another request id."""

    place: Place
    digest: bytes  # of what is asked
    request_id: str
    others: tuple[bytes, ...] = ()  # of the same, under other peppers


class StoredAnswer(Struct, frozen=True):
    """What was answered, byte for byte as its client was sent it."""

    status: int  # HTTP
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


NOT_KEPT = StoredAnswer(409, (), b"")  # stands for an answer that was too long to be kept


async def seal(sealer: Sealer, claim: Claim, answer: StoredAnswer) -> bytes:
    """Return the answer as Postgres keeps it: made small first, because sealed bytes compress no more."""

    def work() -> bytes:
        return sealer.seal(zlib.compress(msgspec.msgpack.encode(answer), 1), _label(claim))

    return await in_parallel(len(answer.body), HEAVY, work)


async def unseal(sealer: Sealer, claim: Claim, sealed: bytes) -> StoredAnswer:
    """Return the answer that was sealed. Raises StoredAnswerUnreadable when it was changed, moved, or is not ours."""

    def work() -> StoredAnswer:
        return msgspec.msgpack.decode(zlib.decompress(sealer.unseal(sealed, _label(claim))), type=StoredAnswer)

    try:
        return await in_parallel(len(sealed), HEAVY, work)
    except (Unsealable, zlib.error, msgspec.MsgspecError) as exc:
        place = claim.place
        log.error(
            "stored_answer_unreadable",
            team_id=place.team_id,
            endpoint=place.endpoint,
            request_id=claim.request_id,
            error=repr(exc),
        )
        raise StoredAnswerUnreadable(
            "The answer that was stored for this Idempotency-Key cannot be read any more. Nothing was run again and "
            "nothing was charged. Use another key to ask again."
        ) from exc


def _label(claim: Claim) -> str:
    """Return what a sealed answer is tied to: its place, what was asked, and which request was answered."""
    place = claim.place
    return msgspec.json.encode([place.team_id, place.endpoint, place.key, claim.digest, claim.request_id]).decode()
