# The model of the schema's functions is worth what it shares with them: the same random verbs, one after another, on
# the model and on Postgres leave the same tables and get the same answers.

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec import to_builtins
from sqlalchemy import text

from billing.core.ids import uuid7
from billing.core.records import Status, UsageRecord
from billing.ledger.ledger import write_records
from billing.quotas.lease_store import NANOUSD, TOKENS, Need, PostgresLeases, Taken, Told
from gateway.storage.database import Database
from tests.simulation.sql_model import SqlModel, day_text, today_at
from tests.support.clock import NOON, SetClock
from tests.support.factories import make_record

STEPS = 300
BETWEEN = 5  # steps between comparisons of all tables: where they differ, they go on to
OWNERS = ("a", "b", "c")
TEAMS = {"t1": ("k1", "k2"), "t2": ("k3",)}
USER = "user:t2/" + "0" * 32
STATUSES = (Status.ANSWERED, Status.ANSWERED, Status.INTERRUPTED, Status.FAILED)
TODAY = int(NOON // 86_400)

SEEN = {
    "owners": """SELECT id, beat, extract(epoch FROM started_at), extract(epoch FROM seen_at),
                        extract(epoch FROM ended_at), extract(epoch FROM set_again_at), backlog, version FROM owners""",
    "failovers": "SELECT id, extract(epoch FROM found_at) FROM failovers",
    "balances": """SELECT scope, unit, period, cap, drawn, corrected, extract(epoch FROM tight_since) FROM balances""",
    "leases": """SELECT owner, scope, unit, to_char(day, 'YYYY-MM-DD'), granted, returned, spent, overdrawn
                 FROM leases""",
    "rows": "SELECT CAST(request_id AS text) FROM usage_records",
    "daily": """SELECT team_id, to_char(day, 'YYYY-MM-DD'), to_char(booked_on, 'YYYY-MM-DD'), key_id, status,
                       CAST(sum(calls) AS bigint), CAST(sum(input_tokens + output_tokens) AS bigint),
                       CAST(sum(cost_nanousd) AS bigint) FROM usage_daily GROUP BY 1, 2, 3, 4, 5""",
}


class Pair:
    """The model and Postgres, told the same."""

    def __init__(self, seed: int, database: Database) -> None:
        self.dice = random.Random(seed)
        self.database = database
        self.clock = SetClock()
        self.postgres = PostgresLeases(database, self.clock, uses_server_time=False)
        self.model = SqlModel()
        self.said: list[UsageRecord] = []

    async def begin(self) -> None:
        """Make teams, keys and owners."""
        async with self.database.begin() as connection:
            for team, keys in TEAMS.items():
                await connection.execute(text("INSERT INTO teams (id, name) VALUES (:team, :team)"), {"team": team})
                for key in keys:
                    await connection.execute(
                        text(
                            "INSERT INTO api_keys (id, team_id, digest, prefix)"
                            " VALUES (CAST(:key AS text), :team, CAST(CAST(:key AS text) AS bytea), '')"
                        ),
                        {"key": key, "team": team},
                    )

    async def step(self) -> str:
        """Do one thing in both; return what it was."""
        self.clock.move(self.dice.choice((0, 1 / 64, 1 / 16, 0.5, 1, 1, 4, 20)))  # of whole microseconds
        verb = self.dice.choices(
            ("take", "give_back", "set_again", "insert", "beat", "limits", "correct", "found", "end", "begin", "close"),
            (40, 12, 4, 20, 8, 4, 2, 1, 1.5, 4, 0.3),
        )[0]
        model, postgres = await getattr(self, f"_{verb}")(self.dice.choice(OWNERS))
        assert model == postgres, verb
        return verb

    async def tables_agree(self) -> None:
        """Compare all tables."""
        model = self.model
        expected: dict[str, list[tuple]] = {
            "owners": [
                (i, o.beat, o.started_at, o.seen_at, o.ended_at, o.set_again_at, o.backlog, o.version)
                for i, o in model.owners.items()
            ],
            "failovers": list(model.failovers.items()),
            "balances": [(*k, b.cap, b.drawn, b.corrected, b.tight_since) for k, b in model.balances.items()],
            "leases": [(*k, one.granted, one.returned, one.spent, one.overdrawn) for k, one in model.leases.items()],
            "rows": [(request_id,) for request_id in model.rows],
            "daily": [(*k, *sums) for k, sums in model.daily.items()],
        }
        async with self.database.begin() as connection:
            for name, query in SEEN.items():
                rows = [tuple(map(_plain, row)) for row in await connection.execute(text(query))]
                ours = [tuple(map(_plain, row)) for row in expected[name]]
                assert sorted(rows, key=repr) == sorted(ours, key=repr), name

    async def _take(self, owner: str) -> Any:
        team = self.dice.choice(tuple(TEAMS))
        key = self.dice.choice(TEAMS[team])
        day = day_text(TODAY + self.dice.choice((0, 0, 0, 0, -1, 1)))
        asks = []
        for _ in range(self.dice.choice((1, 1, 2, 3))):
            ask = []
            for scope in (f"team:{team}", f"key:{key}", *(USER,) * (team == "t2")):
                for unit in (TOKENS, NANOUSD):
                    need = self.dice.choice((-5, 0, 10, 50, 100, 300))
                    want = max(need, 0) + self.dice.choice((0, 0, 100, 1000))
                    ask.append(Need(scope, unit, need, want, max(need, 0) + self.dice.choice((0, 20))))
            asks.append(ask)
        share = self.dice.choice((0.25, 0.125, 0.0833333333333333))
        skew = self.dice.choice((0.0, 0.0, 0.0, 1.5, -3.0))
        moment = self.clock.now()
        model = self.model.take_room(owner, day, asks, share, moment, moment + skew)
        self.postgres._clock = SetClock(moment + skew)
        self.postgres._moment = lambda: datetime.fromtimestamp(moment, UTC)  # type: ignore[method-assign]
        try:
            postgres = await self.postgres.take(owner, day, asks, share)
        finally:
            del self.postgres._moment
            self.postgres._clock = self.clock
        return _taken(model), _taken(postgres)

    async def _give_back(self, owner: str) -> Any:
        told = self._some_told(owner)
        return self.model.give_back(owner, told, self.clock.now()), await self.postgres.give_back(owner, told)

    async def _set_again(self, owner: str) -> Any:
        told = self._some_told(owner)
        return self.model.set_again(owner, told, self.clock.now()), await self.postgres.set_again(owner, told)

    def _some_told(self, owner: str) -> list[Told]:
        told = []
        for (of, scope, unit, day), lease in self.model.leases.items():
            if of == owner and self.dice.random() < 0.5:
                returned = lease.returned + self.dice.choice((-10, 0, 10, 40, lease.granted - lease.returned))
                granted = lease.granted + self.dice.choice((-50, 0, 0, 50))
                told.append(Told(scope, unit, day, max(0, granted), max(0, returned)))
        if self.dice.random() < 0.2:
            told.append(Told("team:t1", TOKENS, day_text(TODAY + 2), 7, 3))
        return list({(one.scope, one.unit, one.day): one for one in told}.values())

    async def _insert(self, owner: str) -> Any:
        records = []
        for _ in range(self.dice.choice((1, 2, 5))):
            if self.said and self.dice.random() < 0.3:
                records.append(self.dice.choice(self.said))
                continue
            team = self.dice.choice(tuple(TEAMS))
            moment = self.clock.now() + 86_400 * self.dice.choice((0, 0, 0, -1))
            records.append(
                make_record(
                    uuid7(int(moment * 1000), self.dice.getrandbits(80)),
                    team_id=team,
                    key_id=self.dice.choice(TEAMS[team]),
                    status=(status := self.dice.choice(STATUSES)),
                    input_tokens=self.dice.randrange(60),
                    output_tokens=self.dice.randrange(60),
                    cached_input_tokens=0,
                    cost_nanousd=0 if status is Status.FAILED else self.dice.randrange(120),
                    owner=self.dice.choice((*OWNERS, "gone")),
                    held_scopes=(USER,) if team == "t2" and self.dice.random() < 0.5 else None,
                )
            )
        self.said += records
        today = today_at(self.clock.now())
        new, beat = self.model.insert(owner, records, today.isoformat())
        async with self.database.begin() as connection:
            written = await write_records(connection, records, today=today, flusher=owner)
        return (len(new), beat), (written.new, written.beat)

    async def _beat(self, owner: str) -> Any:
        watermark, backlog = self.clock.now() - 1, self.dice.randrange(5)
        model = self.model.beat(owner, watermark, backlog, self.clock.now())
        postgres = await self.postgres.beat(owner, watermark, backlog)
        return tuple(
            one and (one.beat, round(one.now, 3), one.living, one.found_at, sorted(one.tight))
            for one in (model, postgres)
        )

    async def _limits(self, _: str) -> Any:
        keys = [f"key:{k}" for ks in TEAMS.values() for k in ks]
        scope = self.dice.choice([*(f"team:{team}" for team in TEAMS), *keys, USER])
        limits = {
            name: cap
            for name, caps in (
                ("tokens_per_day", (500, 2000)), ("nanousd_per_day", (600, 4000)), ("nanousd_per_month", (3000, 9000)),
            )
            if self.dice.random() < 0.6 and (cap := self.dice.choice(caps))
        }  # fmt: skip
        self.model.set_limits(scope, limits, self.clock.now())
        table = "teams" if scope.startswith("team:") else "api_keys"
        if scope == USER:
            return await self._limit_user(limits)
        async with self.database.begin() as connection:
            await connection.execute(
                text(f"UPDATE {table} SET limits = CAST(:limits AS jsonb) WHERE id = :id"),
                {"limits": json.dumps(limits), "id": scope.partition(":")[2]},
            )
            moment = datetime.fromtimestamp(self.clock.now(), UTC)
            await connection.execute(text("SELECT follow_limits(:scope, :moment)"), {"scope": scope, "moment": moment})
        return None, None

    async def _limit_user(self, limits: dict[str, int]) -> Any:
        values = {"limits": json.dumps({"*": {"name": "*", "limits": limits}})}
        async with self.database.begin() as connection:
            await connection.execute(
                text("UPDATE teams SET user_limits = CAST(:limits AS jsonb) WHERE id = 't2'"), values
            )
            moment = datetime.fromtimestamp(self.clock.now(), UTC)
            await connection.execute(text("SELECT follow_value_limits('t2', :moment)"), {"moment": moment})
        return None, None

    async def _correct(self, _: str) -> Any:
        team = self.dice.choice(tuple(TEAMS))
        scopes = [f"team:{team}", *(f"key:{key}" for key in TEAMS[team][: self.dice.randrange(2)])]
        day = day_text(TODAY + self.dice.choice((0, -1)))
        tokens, nanousd = self.dice.randint(-100, 100), self.dice.randint(-300, 300)
        self.model.correct(scopes, day, tokens, nanousd)
        async with self.database.begin() as connection:
            await connection.execute(
                text("SELECT correct_balances(CAST(:scopes AS text[]), :day, :tokens, :nanousd)"),
                {"scopes": scopes, "day": day, "tokens": tokens, "nanousd": nanousd},
            )
        return None, None

    async def _found(self, _: str) -> Any:
        found_at = self.model.failovers.get(1)
        known = self.dice.choice((None, found_at, found_at and found_at - 1))
        return self.model.found_failover(known, self.clock.now()), await self.postgres.found_failover(known)

    async def _end(self, owner: str) -> Any:
        return self.model.end(owner, self.clock.now()), await self.postgres.end(owner)

    async def _begin(self, owner: str) -> Any:
        self.model.begin(owner, "v", self.clock.now())
        await self.postgres.begin(owner, "v")
        return None, None

    async def _close(self, _: str) -> Any:
        day = day_text(TODAY - 1)
        self.model.close_day(day)
        async with self.database.begin() as connection:
            await connection.execute(
                text("INSERT INTO closed_days VALUES (CAST(:day AS text)::date, now()) ON CONFLICT DO NOTHING"),
                {"day": day},
            )
        return None, None


@pytest.mark.parametrize("seed", range(3))
async def test_the_model_is_the_schema(seed: int, database: Database) -> None:
    """Whatever verbs are said in whatever order, the model's tables are those of Postgres, and its answers too."""
    pair = Pair(seed, database)
    await pair.begin()
    verbs: list[str] = []
    for number in range(STEPS):
        verbs.append(await pair.step())
        if (number + 1) % BETWEEN == 0:
            await pair.tables_agree()

    assert {"take", "give_back", "set_again", "insert"} <= set(verbs)
    assert pair.model.leases


def _taken(taken: Taken) -> Any:
    built = to_builtins(taken)
    del built["is_late"]  # the model has no disk
    for name in ("leases", "balances"):
        built[name] = sorted(([_plain(cell) for cell in row] for row in built[name] or ()), key=repr)
    return built


def _plain(cell: Any) -> Any:
    return cell if cell is None or isinstance(cell, str | int) else round(float(cell), 3)
