# What happens at one process reaches those who watch at another, through a real Redis; none is told while none watches,
# and one who does not read holds nothing up.

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast
from uuid import UUID

import msgspec
import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from billing.core.ids import uuid7
from billing.journal.journal import Journal
from gateway.telemetry import live_events
from gateway.telemetry.live_events import MOST_TOLD, MOST_WAITING, LiveEvents, Part, Watcher
from gateway.telemetry.refusals import Refusals
from tests.support.clock import SetClock
from tests.support.factories import make_record


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes look and tell ten times as often."""
    for name in ("LOOK_EVERY", "TELL_EVERY"):
        monkeypatch.setattr(live_events, name, getattr(live_events, name) / 10)


class Source:
    """Where calls end and are refused: what a journal and refusals tell of them."""

    on_record: Any = None
    on_kept: Any = None

    def call(self, number: int = 1, team_id: str = "team_a") -> None:
        if self.on_record is not None:
            self.on_record(make_record(uuid7(1_800_000_000_000, number), team_id=team_id))


@asynccontextmanager
async def process(redis: Redis) -> AsyncIterator[tuple[LiveEvents, Source]]:
    source = Source()
    live = LiveEvents(cast(Journal, source), cast(Refusals, source), redis, SetClock())
    loop = asyncio.create_task(live.run())
    yield live, source
    loop.cancel()


async def heard(watcher: Watcher, count: int) -> list[dict[str, Any]]:
    """Return the events that come, once they are so many."""
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(10):
        while len(found) < count:
            await watcher.news.wait()
            found += [
                msgspec.json.decode(data) for data in re.findall(rb"^data: (.*)$", watcher.take()[0], re.MULTILINE)
            ]
    return found


async def test_what_happens_elsewhere_is_told_while_one_watches(redis: Redis) -> None:
    """Calls and refusals of any process, each once, a team's own to who watches a team; afterwards nothing is noted."""
    async with process(redis) as (here, own), process(redis) as (_, elsewhere):
        own.call()
        assert (own.on_record, elsewhere.on_record) == (None, None)
        every, one = here.watch(None), here.watch("team_b")
        await _true(lambda: own.on_record is not None and elsewhere.on_record is not None)
        own.call(1)
        elsewhere.call(2, "team_b")
        row = {"team_id": "team_a", "key_id": "k", "endpoint": "chat.completions", "model_asked": "m"}
        told = {"http_status": 429, "code": "rate_limit_exceeded", "limit_name": None}
        elsewhere.on_kept({"request_id": UUID(int=7), "message": "No.", **row, **told})
        found = await heard(every, 3)
        [of_team] = await heard(one, 1)

        assert sorted(event["type"] for event in found) == ["call", "call", "refusal"]
        assert {event["team_id"] for event in found if event["type"] == "call"} == {"team_a", "team_b"}
        assert (of_team["team_id"], of_team["status"]) == ("team_b", "answered")
        for watcher in (every, one):
            here.leave(watcher)
        await redis.delete("tollgate:{live}:watched")
        await _true(lambda: own.on_record is None and elsewhere.on_record is None)


async def test_who_comes_right_after_another_watcher_is_told_from_the_first_moment(redis: Redis) -> None:
    """While the word of the one before still counts, what happens goes on to Redis, and is read from there."""
    async with process(redis) as (live, source):
        first = live.watch(None)
        source.call(1)
        await heard(first, 1)
        live.leave(first)
        await _true(lambda: not live._seen)
        second = live.watch(None)
        source.call(2)

        assert [event["type"] for event in await heard(second, 1)] == ["call"]


async def test_what_happens_while_redis_is_told_is_told_next(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process tells and goes on answering: no call falls in between."""
    pipeline = redis.pipeline

    def told(**more: Any) -> Any:
        monkeypatch.undo()
        source.call(2)  # the message with the first one is made
        return pipeline(**more)

    async with process(redis) as (live, source):
        watcher = live.watch(None)
        await _true(lambda: live._seen)
        monkeypatch.setattr(redis, "pipeline", told)
        source.call(1)

        assert len({event["request_id"] for event in await heard(watcher, 2)}) == 2


async def test_who_comes_while_a_process_looks_misses_nothing(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """That none watched a moment ago is no news then."""
    exists, came = redis.exists, list[Watcher]()

    async def looked(*names: str) -> Any:
        monkeypatch.undo()
        found = await exists(*names)
        came.append(live.watch(None))
        source.call()
        return found

    monkeypatch.setattr(redis, "exists", looked)
    async with process(redis) as (live, source):
        await _true(lambda: came)

        assert [event["type"] for event in await heard(came[0], 1)] == ["call"]


async def test_more_than_fits_is_dropped_and_counted(redis: Redis) -> None:
    """At the process that tells, and at a watcher that does not read: the newest stay, the number of others is told."""
    async with process(redis) as (live, source):
        watcher = live.watch(None)
        await _true(lambda: source.on_record is not None)
        for number in range(MOST_TOLD + 50):
            source.call(number)
        await _true(lambda: watcher.dropped == 50)
        for number in range(300):
            watcher.tell(Part(b"%03d" % number, MOST_WAITING // 100, 0))
        frames, dropped = watcher.take()

    assert len(frames) == 3 * 100 and frames.endswith(b"299")
    assert dropped == 50 + MOST_TOLD + 2 * MOST_WAITING


async def test_who_watch_the_same_share_a_look(redis: Redis) -> None:
    """One look is told to all of them; who comes later is told all of it, and who missed some, all as it is then."""
    async with process(redis) as (live, _):
        first, other = live.watch(None, ("breaker",)), live.watch(None, ("replica",))
        first.look.shown["breaker", "a"] = ({}, b"a is open.")
        live.tell_changes(first.look, [b"a is open."])
        second = live.watch(None, ("breaker",))

        assert [one.take()[0] for one in (first, second, other)] == [b"a is open.", b"a is open.", b""]
        first.look.shown["breaker", "a"] = ({}, b"a is closed.")
        live.tell_changes(first.look, [b"a is closed."])
        first.tell(Part(b"calls", MOST_WAITING, 0))
        assert first.take() == (b"callsa is closed.", 1)
        assert second.take() == (b"a is closed.", 0)
        for one in (first, second):
            live.leave(one)
        assert live.watch(None, ("breaker",)).take()[0] == b""


async def test_without_redis_a_process_tells_its_own() -> None:
    """Whoever watches there sees what happens there."""
    async with Redis(port=1, retry=Retry(NoBackoff(), 0)) as away, process(away) as (live, source):
        watcher = live.watch(None)
        await _true(lambda: source.on_record is not None)
        source.call()

        assert [event["type"] for event in await heard(watcher, 1)] == ["call"]


async def _true(is_so: Any) -> None:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0.02)
