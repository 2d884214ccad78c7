# Which streams of responses in the background have news, as one look into Postgres says for all who listen.

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from sqlalchemy import text

from gateway.core.clock import Clock
from gateway.storage.database import Database
from gateway.stored_responses.background_store import ENDPOINT, BackgroundStore, place_of
from gateway.stored_responses.event_watch import Asked, EventWatch

NAMES = ["quiet", "says_more", "ended", "orphaned", "foreign"]
ROWS = (
    "INSERT INTO teams (id, name) VALUES ('a', 'A')",
    """
    INSERT INTO stored_responses (id, team_id, sealed, conversation_bytes, is_open)
    SELECT name, 'a', '', 0, name <> 'ended' FROM unnest(CAST(:names AS text[])) AS name
    """,
    """
    INSERT INTO response_events (response_id, last_event, sealed)
    SELECT name, CASE name WHEN 'says_more' THEN 6 ELSE 5 END, '' FROM unnest(CAST(:names AS text[])) AS name
    """,
    """
    INSERT INTO idempotency (team_id, endpoint, key, body_digest, request_id, owner, lease_until, expires_at)
    SELECT 'a', :endpoint, name, '', name, 'here',
        clock_timestamp() + CASE name WHEN 'orphaned' THEN interval '-1 second' ELSE interval '1 hour' END, 'infinity'
    FROM unnest(CAST(:names AS text[])) AS name
    """,
)


async def test_one_look_tells_which_streams_have_news(database: Database) -> None:
    """Those that say more, are over, are not the listener's, or whose gateway is dead."""
    async with database.begin() as connection:
        for statement in ROWS:
            known = {"names": NAMES, "endpoint": ENDPOINT}
            await connection.execute(text(statement), {name: known[name] for name in known if f":{name}" in statement})
    kept = cast(Any, SimpleNamespace(retention=3600.0, clock=Clock()))
    store = BackgroundStore(kept, cast(Any, None), database)
    asked = [(place_of("b" if name == "foreign" else "a", name), 5) for name in NAMES]

    assert await store.find_news(asked) == [1, 2, 3, 4]


async def test_who_listens_shares_a_look_and_hears_its_own_news() -> None:
    """One look is for all that wait; who has no news waits on, and while none waits nothing is looked for."""
    looks: list[Sequence[Asked]] = []

    async def find(asked: Sequence[Asked]) -> list[int]:
        looks.append(asked)
        if len(looks) == 2:
            raise ConnectionError("Postgres is away")
        return [number for number, (place, _) in enumerate(asked) if len(looks) > 2 or place.key == "r0"]

    watch = EventWatch(find, every=0.01, away=0.01)
    waiting = [asyncio.create_task(watch.news(place_of("a", f"r{number}"), 0)) for number in range(3)]
    await waiting[0]
    first = [task.done() for task in waiting]
    await asyncio.gather(*waiting)
    seen = len(looks)
    await asyncio.sleep(0.05)

    assert first == [True, False, False] and [len(asked) for asked in looks] == [3, 2, 2]
    assert len(looks) == seen
