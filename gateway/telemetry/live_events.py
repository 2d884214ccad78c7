# Calls and refusals as they happen, at every process, for those who watch (GET /admin/live). While none does nothing is
# made of them, and each process looks once a second whether one does. They go through a short stream in Redis, those of
# a quarter second at once; of more than fits the rest is dropped and counted. No call waits for any of it.

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import msgspec
import structlog
from redis.asyncio import Redis

from billing.core.records import TOKENS, UsageRecord
from billing.journal.journal import Journal
from billing.quotas.rate_wire import REDIS_AWAY
from gateway.accounts.serializers import cost_view, moment_of
from gateway.core.clock import Clock
from gateway.core.json_text import to_json
from gateway.telemetry.refusals import Refusals

WATCHED, STREAM = "tollgate:{live}:watched", "tollgate:{live}:events"  # Redis: there while one watches; what is told
WATCHED_FOR = 5  # seconds after the last word of a process with a watcher
LOOK_EVERY = 1.0  # seconds between looks whether one watches
TELL_EVERY = 0.25  # seconds between messages of a process
MOST_TOLD = 100  # events in a message: 400 a second of each process, some 35 kB
MESSAGES_KEPT, KEPT_FOR = 1000, 30  # in Redis; seconds
MOST_WAITING = 2000  # events that one watcher has not read
SHOWN = ("request_id", "team_id", "key_id", "endpoint", "model_asked", "model_used", "provider", "tier", "route_reason")
REFUSED = ("team_id", "key_id", "endpoint", "model_asked", "http_status", "code", "limit_name")

log = structlog.get_logger(__name__)

LiveEvent = dict[str, Any]  # with "type" and "team_id"


class Watcher:
    """What one who watches has not read yet: bounded, the oldest goes first."""

    def __init__(self, team_id: str | None) -> None:
        self.dropped = 0
        self.news = asyncio.Event()
        self.team_id = team_id
        self._waiting: deque[LiveEvent] = deque()

    def tell(self, events: list[LiveEvent], dropped: int) -> None:
        """Add events, those of the team that is watched."""
        self.dropped += dropped
        for event in events:
            if self.team_id in (None, event["team_id"]):
                if len(self._waiting) >= MOST_WAITING:
                    self._waiting.popleft()
                    self.dropped += 1
                self._waiting.append(event)
        self.news.set()

    def take(self) -> tuple[list[LiveEvent], int]:
        """Return what came since it was last asked for, and how many events were dropped."""
        events, dropped = list(self._waiting), self.dropped
        self._waiting.clear()
        self.dropped = 0
        self.news.clear()
        return events, dropped


class LiveEvents:
    """What happens, on its way to those who watch, at whichever process."""

    def __init__(self, journal: Journal, refusals: Refusals, redis: Redis, clock: Clock) -> None:
        self._journal = journal
        self._refusals = refusals
        self._redis = redis
        self._clock = clock
        self._watchers: set[Watcher] = set()
        self._gathered: list[LiveEvent] = []
        self._dropped = 0
        self._seen = ""  # the id of the last message read
        self._wake = asyncio.Event()

    @property
    def watchers(self) -> int:
        """How many watch at this process."""
        return len(self._watchers)

    def watchers_of(self, team_id: str) -> int:
        """How many watch one team alone at this process."""
        return sum(watcher.team_id == team_id for watcher in self._watchers)

    @property
    def is_watched(self) -> bool:
        """Whether calls and refusals of this process are told."""
        return self._journal.on_record is not None

    def watch(self, team_id: str | None) -> Watcher:
        """Return a new watcher, of one team or of all, who is told of this process from now on; ``leave`` it."""
        self._follow(is_watched=True)
        watcher = Watcher(team_id)
        self._watchers.add(watcher)
        self._wake.set()
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Tell a watcher nothing more."""
        self._watchers.discard(watcher)

    async def run(self) -> None:
        """Tell what happens for as long as one watches, anywhere; for ever."""
        while True:
            try:
                if await self._look():
                    await self._tell_for_a_while()
                    continue
            except REDIS_AWAY as exc:
                log.warning("live_events_alone", error=repr(exc))
                self._tell_watchers(*self._take_gathered())
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
                message = to_json({"events": events, "dropped": dropped})
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
            said = msgspec.json.decode(fields[b"said"])
            self._tell_watchers(said["events"], said["dropped"])

    def _tell_watchers(self, events: list[LiveEvent], dropped: int) -> None:
        for watcher in self._watchers:
            watcher.tell(events, dropped)

    def _follow(self, is_watched: bool) -> None:
        self._journal.on_record = self._note_call if is_watched else None
        self._refusals.on_kept = self._note_refusal if is_watched else None
        if not is_watched:
            self._take_gathered()

    def _take_gathered(self) -> tuple[list[LiveEvent], int]:
        events, dropped = self._gathered, self._dropped
        self._gathered, self._dropped = [], 0
        return events, dropped

    def _note_call(self, record: UsageRecord) -> None:
        if self._has_room():
            names = (*SHOWN, *TOKENS, "first_token_ms", "total_ms")
            told = {"status": record.status.value, **cost_view(record.cost_nanousd)}
            created = {"created_at": moment_of(record.created_at)}
            self._gathered.append(
                {"type": "call", **{name: getattr(record, name) for name in names}, **told, **created}
            )

    def _note_refusal(self, row: dict[str, Any]) -> None:
        if self._has_room():
            told = {"request_id": str(row["request_id"]), "created_at": moment_of(self._clock.now())}
            self._gathered.append({"type": "refusal", **told, **{name: row[name] for name in REFUSED}})

    def _has_room(self) -> bool:
        has_room = len(self._gathered) < MOST_TOLD
        self._dropped += not has_room
        return has_room


async def _first(event: asyncio.Event, seconds: float) -> None:
    """Wait until it is set, so long at the most."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass


def _text(ident: bytes | str) -> str:
    return ident.decode() if isinstance(ident, bytes) else ident
