# What a response may go on from on the connection that asked for it, though nothing is stored: the last response of
# each of its streams, with all items before it. Kept in memory alone, within a bound for all connections of the
# process; what has no room any more is not found, and its client sends the conversation anew.

from __future__ import annotations

from collections import OrderedDict

import msgspec
from msgspec import Struct

from protocol.responses import InputItem

MOST_BYTES = 256 * 1024 * 1024  # of all connections of a process, as JSON
LARGEST = 32 * 1024 * 1024  # of one conversation

CONNECTION_TURNS = "tollgate.turns"  # an ASGI extension: a ConnectionTurns, where a request came over a WebSocket
OWN_FIELDS = ("type", "stream_id", "generate", "idempotency_key")  # of a message there, which no body of a response has

Items = tuple[InputItem, ...]


class LocalTurn(Struct, frozen=True):
    """A conversation up to the end of a response."""

    items: Items
    size: int  # bytes of them in JSON, about
    is_stored: bool


class _Response(Struct):
    id: str
    output: Items
    store: bool = False


class _Ended(Struct):
    response: _Response


class LocalTurns:
    """Those of all connections of a process; where they have no more room, the oldest is dropped."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._kept: OrderedDict[tuple[int, str], LocalTurn] = OrderedDict()  # by connection and response
        self._bytes = 0

    def put(self, place: tuple[int, str], turn: LocalTurn) -> None:
        """Keep a turn."""
        self.drop(place)
        self._kept[place] = turn
        self._bytes += turn.size
        while self._bytes > self._most:
            self.drop(next(iter(self._kept)))

    def find(self, place: tuple[int, str]) -> LocalTurn | None:
        """Return a turn that is kept."""
        return self._kept.get(place)

    def drop(self, place: tuple[int, str]) -> None:
        """Keep a turn no longer."""
        if (turn := self._kept.pop(place, None)) is not None:
            self._bytes -= turn.size


class ConnectionTurns:
    """Those of one connection, on which one response runs at a time."""

    def __init__(self, shared: LocalTurns) -> None:
        self.is_warm_up = False  # whether the response that runs is not to be generated
        self._shared = shared
        self._last: dict[str | None, str] = {}  # response by stream
        self._asked: tuple[Items, int] | None = None  # what the response that runs was asked with, all in all

    def note_asked(self, items: Items, size: int) -> None:
        """Note the conversation that a response will be the end of, and its bytes; none that is longer than is kept."""
        self._asked = (items, size) if size <= LARGEST else None

    def note_nothing(self) -> None:
        """Note that the response which runs is not to be gone on from here."""
        self._asked = None

    def keep(self, stream_id: str | None, event: bytes) -> None:
        """Keep how a response ended, as the last event of its stream tells it."""
        asked, self._asked = self._asked, None
        if asked is None:
            return
        response = msgspec.json.decode(event, type=_Ended).response
        items, size = asked
        if (before := self._last.get(stream_id)) is not None:
            self._shared.drop((id(self), before))
        turn = LocalTurn((*items, *response.output), size + len(event), response.store)
        self._shared.put((id(self), response.id), turn)
        self._last[stream_id] = response.id

    def find(self, response_id: str | None) -> LocalTurn | None:
        """Return the turn that a response of this connection ended, while it is kept."""
        return None if response_id is None else self._shared.find((id(self), response_id))

    def items(self) -> dict[str | None, InputItem]:
        """Return the items of the conversations that are kept, by their ids."""
        turns = [self.find(response_id) for response_id in self._last.values()]
        return {item.id: item for turn in turns if turn is not None for item in turn.items if item.id is not None}

    def forget(self, response_id: str) -> None:
        """Keep a turn no longer: going on from it has failed."""
        self._shared.drop((id(self), response_id))

    def close(self) -> None:
        """Keep none: the connection has ended."""
        for response_id in self._last.values():
            self.forget(response_id)
        self._last.clear()
