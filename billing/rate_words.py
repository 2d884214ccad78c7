# What an owner and rates.lua say to each other, and what a caller hears of a refusal. Shapes only.

from __future__ import annotations

import msgspec
from msgspec import Struct

from billing.holds import LimitName, Remaining, Scope

BUCKETS = 4  # in a second, as rates.lua counts
WINDOW = 60 * BUCKETS  # a bucket counts while so many later ones have begun, and one more
NONE = -1  # no limit

NAMES = (LimitName.REQUESTS_PER_MINUTE, LimitName.TOKENS_PER_MINUTE, LimitName.CONCURRENT_REQUESTS)


class RefusedRate(Struct, frozen=True, kw_only=True):
    """A rate has no room. ``retry_after`` is seconds from the very bucket that refused; ``None``: no wait helps."""

    scope: Scope
    limit: LimitName
    cap: int
    used: int  # settled
    held: int
    wanted: int
    retry_after: float | None
    alone_exceeds: bool  # this request would not fit even into an empty limit
    requests: Remaining | None = None
    tokens: Remaining | None = None


class ScopeSaid(Struct, array_like=True):
    """One scope in a command: its caps, the slots that stay its owner's, and what is wanted above the needs."""

    requests_cap: int
    tokens_cap: int
    slots_cap: int
    slots: int
    more_requests: int
    more_tokens: int
    more_slots: int
    changes: list[tuple[int, int, int, int]]  # bucket; requests, tokens, held tokens


class Command(Struct, array_like=True):
    """What an owner says of one team."""

    number: int
    now: float  # unix seconds, or -1 for the server's
    owners: int
    owner: str
    scopes: list[ScopeSaid]
    needs: list[list[int]]  # tokens, and the scopes' places, from 1


class ScopeTold(Struct, array_like=True, frozen=True):
    """One scope in an answer: what all owners have, with this command's, and what was drawn above the needs."""

    requests: int = 0
    tokens: int = 0
    held: int = 0  # of the tokens
    slots: int = 0
    more_requests: int = 0
    more_tokens: int = 0
    more_slots: int = 0


class RefusalTold(Struct, array_like=True, frozen=True):
    """Why a need was refused."""

    scope: int  # from 1
    limit: int  # from 1, in the order of NAMES
    used: int  # with what is held
    wait: float  # seconds; -1: running calls are in its way


class Answer(Struct, array_like=True, frozen=True):
    """What rates.lua answers."""

    number: int
    now: float
    bucket: int
    was_known: int
    scopes: list[ScopeTold]
    refusals: list[list[RefusalTold]]


pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder(Answer).decode
