# What a response may go on from on the connection that asked for it, though nothing is stored: the last response of
# each of its streams, with all items before it. Kept in memory alone, within a bound for all connections of the
# process; what has no room any more is not found, and its client sends the conversation anew. Room is made by the team
# that has most of it, so that none drops what is another's.

from __future__ import annotations

from collections import Counter, OrderedDict

import msgspec
from msgspec import Raw, Struct

from gateway.core.errors import StoredResponseUnreadable
from gateway.stored_responses.turns import read_item
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
    output: tuple[Raw, ...]
    store: bool = False


class _Ended(Struct):
    response: _Response


Place = tuple[int, str]  # a connection and a response


class LocalTurns:
    """Those of all connections of a process; where they have no more room, the oldest of the team that has most is
    dropped."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._kept: dict[str, OrderedDict[Place, LocalTurn]] = {}  # by team
        self._bytes: Counter[str] = Counter()  # likewise

    def put(self, team_id: str, place: Place, turn: LocalTurn) -> None:
        """Keep a turn of a team's."""
        self.drop(team_id, place)
        self._kept.setdefault(team_id, OrderedDict())[place] = turn
        self._bytes[team_id] += turn.size
        while self._bytes.total() > self._most:
            ((largest, _),) = self._bytes.most_common(1)
            self.drop(largest, next(iter(self._kept[largest])))

    def find(self, team_id: str, place: Place) -> LocalTurn | None:
        """Return a turn that is kept."""
        kept = self._kept.get(team_id)
        return None if kept is None else kept.get(place)

    def drop(self, team_id: str, place: Place) -> None:
        """Keep a turn no longer."""
        if (turn := self.find(team_id, place)) is None:
            return
        del self._kept[team_id][place]
        self._bytes[team_id] -= turn.size
        if not self._kept[team_id]:
            del self._kept[team_id], self._bytes[team_id]


class ConnectionTurns:
    """Those of one connection, on which one response runs at a time."""

    def __init__(self, shared: LocalTurns) -> None:
        self.is_warm_up = False  # whether the response that runs is not to be generated
        self._shared = shared
        self._team_id = ""
        self._last: dict[str | None, str] = {}  # response by stream
        self._asked: tuple[Items, int] | None = None  # what the response that runs was asked with, all in all

    def begin(self, team_id: str) -> None:
        """Keep turns as a team's from now on."""
        self._team_id = team_id

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
            self._shared.drop(self._team_id, (id(self), before))
        try:
            turn = LocalTurn((*items, *map(read_item, response.output)), size + len(event), response.store)
        except StoredResponseUnreadable:  # as it is told where the response was stored
            return
        self._shared.put(self._team_id, (id(self), response.id), turn)
        self._last[stream_id] = response.id

    def find(self, response_id: str | None) -> LocalTurn | None:
        """Return the turn that a response of this connection ended, while it is kept."""
        return None if response_id is None else self._shared.find(self._team_id, (id(self), response_id))

    def items(self) -> dict[str | None, InputItem]:
        """Return the items of the conversations that are kept, by their ids."""
        turns = [self.find(response_id) for response_id in self._last.values()]
        return {item.id: item for turn in turns if turn is not None for item in turn.items if item.id is not None}

    def forget(self, response_id: str) -> None:
        """Keep a turn no longer: going on from it has failed."""
        self._shared.drop(self._team_id, (id(self), response_id))

    def close(self) -> None:
        """Keep none: the connection has ended."""
        for response_id in self._last.values():
            self.forget(response_id)
        self._last.clear()
