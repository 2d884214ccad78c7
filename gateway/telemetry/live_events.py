# Calls and refusals as they happen, at every process, for those who watch (GET /admin/live). While none does nothing is
# made of them, and each process looks once a second whether one does. They go through a short stream in Redis, those of
# a quarter second at once, each encoded once as all who watch are sent it, and put together once for all who watch the
# same; of more than fits the rest is dropped and counted. No call waits for any of it.

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import structlog
from msgspec import Raw, Struct
from redis.asyncio import Redis

from billing.core.money import to_text
from billing.core.records import UsageRecord
from billing.journal.journal import Journal
from billing.quotas.rate_wire import REDIS_AWAY
from gateway.core.clock import Clock
from gateway.core.json_text import to_json
from gateway.telemetry.refusals import Refusals

WATCHED, STREAM = "tollgate:{live}:watched", "tollgate:{live}:frames"  # Redis: there while one watches; what is told
WATCHED_FOR = 5  # seconds after the last word of a process with a watcher
LOOK_EVERY = 1.0  # seconds between looks whether one watches
TELL_EVERY = 0.25  # seconds between messages of a process
MOST_TOLD = 100  # events in a message: 400 a second of each process, some 35 kB
MESSAGES_KEPT, KEPT_FOR = 1000, 30  # in Redis; seconds
MOST_WAITING = 2000  # events that one watcher has not read
REFUSED = ("team_id", "key_id", "endpoint", "model_asked", "http_status", "code", "limit_name")

log = structlog.get_logger(__name__)


class LiveCall(Struct, frozen=True, tag_field="type", tag="call"):
    """A call that has ended, as those who watch are told of it."""

    request_id: str
    team_id: str
    key_id: str
    endpoint: str
    model_asked: str
    model_used: str
    provider: str
    tier: str
    route_reason: str
    input_tokens: int
    cached_input_tokens: int
    cache_write_tokens: int
    output_tokens: int
    reasoning_tokens: int
    first_token_ms: float | None
    total_ms: float
    status: str
    cost_usd: Raw  # a number with exactly its digits
    cost_usd_exact: str
    created_at: datetime


OF_RECORD = attrgetter(*LiveCall.__struct_fields__[: LiveCall.__struct_fields__.index("cost_usd")])
LiveEvent = dict[str, Any]  # with "type" and "team_id"
Happened = UsageRecord | LiveEvent  # a call that has ended, or an event that is none


class Told(Struct, frozen=True, array_like=True):
    """An event as a server sends it, and who is to see it."""

    kind: str
    team_id: str | None
    frame: bytes


class Message(Struct, frozen=True, array_like=True):
    """What a process tells in Redis at once."""

    told: list[Told]
    dropped: int


DECODER = msgspec.msgpack.Decoder(Message)


def frame_of(event: LiveEvent | LiveCall, kind: str) -> bytes:
    """Return an event as server-sent events have it."""
    return b"event: " + kind.encode() + b"\ndata: " + to_json(event) + b"\n\n"


def told_of(happened: Happened) -> Told:
    """Return what is told of a call that has ended, or of what else has happened."""
    if not isinstance(happened, UsageRecord):
        return Told(happened["type"], happened["team_id"], frame_of(happened, happened["type"]))
    cost = to_text(happened.cost_nanousd)
    created = datetime.fromtimestamp(happened.created_at, UTC)
    call = LiveCall(*OF_RECORD(happened), Raw(cost.encode()), cost, created)  # type: ignore[call-arg]
    return Told("call", happened.team_id, frame_of(call, "call"))


class Part(NamedTuple):
    """What of a message all who watch the same are sent, put together once."""

    frames: bytes
    events: int
    dropped: int


class Look:
    """What all who watch the same were last told of what changes by and by: by type and id, the facts and the frame."""

    def __init__(self) -> None:
        self.at = -math.inf  # on the monotonic clock
        self.shown: dict[tuple[str, str], tuple[dict[str, Any], bytes]] = {}

    @property
    def frames(self) -> bytes:
        """All of it, for one who has seen nothing of it, or not all."""
        return b"".join(frame for _, frame in self.shown.values())


class Watcher:
    """What one who watches has not read yet: bounded, the oldest goes first."""

    def __init__(self, team_id: str | None, kinds: Collection[str], look: Look) -> None:
        self.dropped = 0
        self.news = asyncio.Event()
        self.sees = (team_id, frozenset(kinds))
        self.look = look
        self._waiting: deque[Part] = deque()
        self._events = 0
        self._has_missed = bool(look.shown)  # of the look

    def tell(self, part: Part) -> None:
        """Add what has happened, if that is anything."""
        if not part.events and not part.dropped:
            return  # of another team
        self._waiting.append(part)
        self._events += part.events
        self.dropped += part.dropped
        while self._events > MOST_WAITING:
            oldest = self._waiting.popleft()
            self._events -= oldest.events
            self.dropped += oldest.events
            self._has_missed = True
        self.news.set()

    def take(self) -> tuple[bytes, int]:
        """Return what came since it was last asked for, and how many events were dropped."""
        frames, dropped = b"".join([part.frames for part in self._waiting]), self.dropped
        frames += self.look.frames if self._has_missed else b""  # as all is now
        self._waiting.clear()
        self._events = self.dropped = 0
        self._has_missed = False
        self.news.clear()
        return frames, dropped


class LiveEvents:
    """What happens, on its way to those who watch, at whichever process."""

    def __init__(self, journal: Journal, refusals: Refusals, redis: Redis, clock: Clock) -> None:
        self._journal = journal
        self._refusals = refusals
        self._redis = redis
        self._clock = clock
        self._watchers: set[Watcher] = set()
        self._gathered: list[Happened] = []
        self._dropped = 0
        self._seen = ""  # the id of the last message read
        self._wake = asyncio.Event()

    @property
    def watchers(self) -> int:
        """How many watch at this process."""
        return len(self._watchers)

    def watchers_of(self, team_id: str) -> int:
        """How many watch one team alone at this process."""
        return sum(watcher.sees[0] == team_id for watcher in self._watchers)

    @property
    def is_watched(self) -> bool:
        """Whether calls and refusals of this process are told."""
        return self._journal.on_record is not None

    def watch(self, team_id: str | None, kinds: Collection[str] = ("call", "refusal")) -> Watcher:
        """Return a new watcher, of one team or of all, who is told of this process from now on; ``leave`` it."""
        self._follow(is_watched=True)
        look = next((one.look for one in self._watchers if one.sees == (team_id, frozenset(kinds))), Look())
        watcher = Watcher(team_id, kinds, look)
        self._watchers.add(watcher)
        self._wake.set()
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Tell a watcher nothing more."""
        self._watchers.discard(watcher)

    def tell_changes(self, look: Look, frames: list[bytes]) -> None:
        """Tell all who share a look what it has found."""
        part = Part(b"".join(frames), len(frames), 0)
        for watcher in self._watchers:
            if watcher.look is look:
                watcher.tell(part)

    async def run(self) -> None:
        """Tell what happens for as long as one watches, anywhere; for ever."""
        while True:
            try:
                if await self._look():
                    await self._tell_for_a_while()
                    continue
            except REDIS_AWAY as exc:
                log.warning("live_events_alone", error=repr(exc))
                happened, dropped = self._take_gathered()
                self._tell_watchers(Message([told_of(one) for one in happened], dropped))
            self._wake.clear()
            await _first(self._wake, LOOK_EVERY if not self._watchers else TELL_EVERY)

    async def _look(self) -> bool:
        """Return whether one watches; from then on, or no longer, note what happens. Raises one of REDIS_AWAY."""
        self._follow(bool(self._watchers) or self.is_watched)  # those of this process are told even without Redis
        if self._watchers:
            await self._redis.set(WATCHED, 1, ex=WATCHED_FOR)
            if not self._seen:
                last: Any = await self._redis.xrevrange(STREAM, count=1)
                self._seen = _text(last[0][0]) if last else "0-0"
        else:
            self._seen = ""
        is_watched = bool(await self._redis.exists(WATCHED)) or bool(self._watchers)  # one may have come meanwhile
        self._follow(is_watched)
        return is_watched

    async def _tell_for_a_while(self) -> None:
        for _ in range(round(LOOK_EVERY / TELL_EVERY)):
            await asyncio.sleep(TELL_EVERY)
            if self._watchers and not self._seen:
                return  # one has come: from where it reads is looked up before more is told
            if self._gathered or self._dropped:
                events, dropped = self._take_gathered()  # what happens while Redis is told is for the next message
                message = encoded(events, dropped)
                try:
                    async with self._redis.pipeline(transaction=False) as pipeline:
                        pipeline.xadd(STREAM, {"said": message}, maxlen=MESSAGES_KEPT, approximate=False)
                        pipeline.expire(STREAM, KEPT_FOR)
                        await pipeline.execute()
                except REDIS_AWAY:
                    self._gathered, self._dropped = events + self._gathered, dropped + self._dropped
                    raise
            if self._watchers and self._seen:
                await self._read()

    async def _read(self) -> None:
        told: Any = await self._redis.xread({STREAM: self._seen}, count=MESSAGES_KEPT // 4)
        for ident, fields in told[0][1] if told else ():
            self._seen = _text(ident)
            self._tell_watchers(decoded(fields[b"said"]))

    def _tell_watchers(self, message: Message) -> None:
        parts: dict[tuple[str | None, frozenset[str]], Part] = {}
        for watcher in self._watchers:
            if (part := parts.get(watcher.sees)) is None:
                part = parts[watcher.sees] = _part_of(message, *watcher.sees)
            watcher.tell(part)

    def _follow(self, is_watched: bool) -> None:
        self._journal.on_record = self._note_call if is_watched else None
        self._refusals.on_kept = self._note_refusal if is_watched else None
        if not is_watched:
            self._take_gathered()

    def _take_gathered(self) -> tuple[list[Happened], int]:
        events, dropped = self._gathered, self._dropped
        self._gathered, self._dropped = [], 0
        return events, dropped

    def _note_call(self, record: UsageRecord) -> None:
        if self._has_room():
            self._gathered.append(record)

    def _note_refusal(self, row: dict[str, Any]) -> None:
        if self._has_room():
            told = {"request_id": str(row["request_id"]), "created_at": self._clock.moment()}
            self._gathered.append({"type": "refusal", **told, **{name: row[name] for name in REFUSED}})

    def _has_room(self) -> bool:
        has_room = len(self._gathered) < MOST_TOLD
        self._dropped += not has_room
        return has_room


def encoded(happened: Iterable[Happened], dropped: int) -> bytes:
    """Return a message for Redis."""
    return msgspec.msgpack.encode(Message([told_of(one) for one in happened], dropped))


def decoded(message: bytes) -> Message:
    """Return the message that another process, or this one, has told."""
    return DECODER.decode(message)


def _part_of(message: Message, team_id: str | None, kinds: frozenset[str]) -> Part:
    frames = [one.frame for one in message.told if one.kind in kinds and team_id in (None, one.team_id)]
    return Part(b"".join(frames), len(frames), message.dropped)


async def _first(event: asyncio.Event, seconds: float) -> None:
    """Wait until it is set, so long at the most."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass


def _text(ident: bytes | str) -> str:
    return ident.decode() if isinstance(ident, bytes) else ident
