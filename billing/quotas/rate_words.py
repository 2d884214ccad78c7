# What rates.lua answers to an owner. Shapes only.

from __future__ import annotations

import msgspec
from msgspec import Struct

BUCKETS = 4  # in a second, as rates.lua counts
WINDOW = 60 * BUCKETS  # a bucket counts while so many later ones have begun, and one more
MINUTE = 60.0  # seconds
NONE = -1  # no limit


class ScopeTold(Struct, array_like=True, frozen=True):
    """One scope in an answer: what all owners have, with this command's, and the slice."""

    requests: int = 0
    tokens: int = 0
    held: int = 0  # of the tokens
    slots: int = 0
    own_slots: int = 0  # of this owner, with those of the slice
    calls: int = 0  # for which the slice is
    call_tokens: int = 0  # of all of these


class Answer(Struct, array_like=True, frozen=True):
    """What rates.lua answers."""

    number: int
    now: float
    bucket: int
    was_known: int
    scopes: list[ScopeTold]
    refusals: list[tuple[int, int, float]]  # why a need waits longest: scope and limit, from 1; seconds, or 0: granted


pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder(Answer).decode
