# What is kept of a call whose team wants its contents kept: what was asked, as a policy let it out, and what its client
# got. Gathered while the reply passes, encoded and sealed behind it.

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from billing.core.records import UsageRecord
from gateway.calls.accumulate import Collector
from gateway.calls.call import Call
from gateway.calls.hooks import ReplyHook
from gateway.storage.encryption import Sealer
from protocol.events import Delta
from protocol.inference import WholeReply

LONGEST = 1024 * 1024  # bytes of a request, and characters of an answer, that are kept; of longer ones neither


class Contents(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a row holds, as JSON. A recording or a picture that came as an upload is not a part of it."""

    endpoint: str  # as gateway.dialects.table names it
    request: Raw | None = None  # in its caller's dialect where that has a form of its own; null: it is too long
    answer: Raw | None = None  # whole, as a chat's or a completion's choices have it; null: none came, or too long
    status: str


class Gathered(Struct, eq=False):
    """The contents of one call as the process has them: values that nothing changes any more."""

    call: Call
    status: str
    collector: Collector | None = None  # of a stream
    whole: WholeReply | None = None
    size: int = 0  # characters of a stream

    @property
    def team_id(self) -> str:
        """Whose they are."""
        return self.call.caller.team.id

    @property
    def request_id(self) -> str:
        """Of which call."""
        return self.call.request_id

    @property
    def weight(self) -> int:
        """About how much memory it keeps, in bytes."""
        return self.call.size + self.size + 2_000

    def sealed(self, sealer: Sealer) -> bytes:
        """Return what its row holds: made small first, because sealed bytes compress no more."""
        said = msgspec.json.encode(self._contents())
        return sealer.seal(zlib.compress(said, 1), label_of(self.team_id, self.request_id))

    def _contents(self) -> Contents:
        call = self.call
        asked = call.request if call.native is None else call.native
        answer = self.whole if self.collector is None else self.collector.reply()
        return Contents(
            endpoint=call.endpoint,
            request=_within(asked) if call.size <= LONGEST else None,
            answer=None if answer is None else _within(answer),
            status=self.status,
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
        self._collector: Collector | None = Collector(call.request)
        self._size = 0
        self._whole: WholeReply | None = None

    def delta(self, delta: Delta) -> Sequence[Delta]:
        """Gather, and change nothing."""
        if self._collector is not None:
            self._size += len(delta.text) + len(delta.reasoning) + sum(len(each.arguments) for each in delta.tool_calls)
            self._collector.add(delta)
            if self._size > LONGEST:
                self._collector = None
        return (delta,)

    async def whole(self, whole: WholeReply) -> WholeReply:
        """Gather a reply that came whole."""
        self._whole, self._collector = whole, None
        return whole

    def close(self, record: UsageRecord) -> None:
        """Have kept what there is."""
        collector = self._collector if self._size else None
        self._keep(Gathered(self._call, record.status, collector, self._whole, self._size))


def _within(value: Struct) -> Raw | None:
    encoded = msgspec.json.encode(value)
    return Raw(encoded) if len(encoded) <= 2 * LONGEST else None
