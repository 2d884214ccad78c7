# The judge of the money: reads ledger, statements, leases, balances and journals by plain SQL, plain Redis commands and
# the bytes on disk, adds up by itself, and says in words where they differ from each other or from what clients saw.
# It uses nothing of the code that it judges but the layout of a journal folder.

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import date, timedelta
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any, cast

import asyncpg
import msgspec
from redis.asyncio import Redis

from billing.journal.owner_files import ENDED, OWNER
from billing.journal.segments import KEPT, SUFFIX, Kind, Segment
from gateway.run.processes import is_running
from tests.support.fault_house import MODELS
from tests.support.fault_load import Attempt, Seen

CHARGED = ("answered", "interrupted", "blocked")
TOKENS = ("input_tokens", "cached_input_tokens", "cache_write_tokens", "output_tokens", "reasoning_tokens")
LINE = ("team_id", "day", "key_id", "model_used", "tier", "status")
EPOCH = date(1970, 1, 1)
LATER = "Ask again with the same Idempotency-Key."  # what a refusal says whose answer is made and not stored yet,
LET_GO = "Send it again with the same Idempotency-Key."  # or whose place was lost, its upstream asked: nothing is owed

FORGOT_SINCE = """
    SELECT EXISTS (SELECT FROM failovers WHERE found_at > (SELECT min(created_at) FROM teams WHERE id = ANY($1)))
"""

Row = dict[str, Any]
Room = tuple[str, str, str]  # scope, unit, and day or month


async def has_forgotten(connection: asyncpg.Connection, teams: Sequence[str]) -> bool:
    """Whether the database was found to have forgotten something since these teams were made."""
    return bool(await connection.fetchval(FORGOT_SINCE, teams))


async def read_rows(connection: asyncpg.Connection, teams: Sequence[str]) -> list[Row]:
    """Return every row that the ledger has of these teams."""
    rows = await connection.fetch("SELECT * FROM usage_records WHERE team_id = ANY($1)", teams)
    return [{**row, "request_id": str(row["request_id"])} for row in rows]


def compare_calls(
    attempts: Sequence[Attempt], rows: Sequence[Row], was_killed: Callable[[Attempt], bool], *, forgot: bool
) -> Iterator[str]:
    """Hold what clients saw against the ledger: one row for whoever was answered, none for whoever was refused.

    ``was_killed`` tells of a call whose gateway died under it or right after: its progress may be unknown. A database
    that ``forgot`` something may not know any more who runs the call of a key: its answer is then none.
    """
    by_attempt: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_attempt[row["client_request_id"]].append(row)
    for stranger in by_attempt.keys() - {attempt.id for attempt in attempts}:
        yield f"rows for a call that nobody made: {by_attempt[stranger]}"
    by_key: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        if attempt.idempotency_key is not None:
            by_key[attempt.idempotency_key].append(attempt)
    for same in by_key.values():
        found = [row for attempt in same for row in by_attempt[attempt.id]]
        if wrong := _wrong_rows_of_one_key(same, found, forgot):
            yield f"{wrong}: {same}, rows {[(row['request_id'], row['status']) for row in found]}"
    for attempt in attempts:
        found = by_attempt[attempt.id]
        wrong = _wrong_rows(attempt, found, was_killed) if attempt.idempotency_key is None else ""
        if wrong:
            shown = [(row["request_id"], row["status"], row["cost_nanousd"]) for row in found]
            yield f"{wrong}: {attempt}, rows {shown}"


def _wrong_rows(attempt: Attempt, rows: Sequence[Row], was_killed: Callable[[Attempt], bool]) -> str:
    statuses = [row["status"] for row in rows]
    if len(rows) > 1:
        return "more than one row"
    if any(attempt.request_id not in (None, row["request_id"]) for row in rows):
        return "a row under another id"
    match attempt.seen:
        case Seen.HUNG | Seen.MUTE:
            return "a call that did not end honestly"
        case Seen.ANSWERED:
            if statuses != ["answered"]:
                return "an answered call without its row"
            return "" if attempt.usage is None else _wrong_usage(attempt.usage, rows[0])
        case Seen.INTERRUPTED:
            return "" if statuses == ["interrupted"] else "an interrupted call without its row"
        case Seen.FAILED:
            return "" if statuses == ["failed"] else "a failed call without its row"
        case Seen.REFUSED:
            return "a row for a refused call" if rows else ""
        case Seen.LEFT:
            is_booked = statuses in (["answered"], ["interrupted"]) or (statuses == ["failed"] and was_killed(attempt))
            return "" if is_booked else "a call whose client left without its row"
        case Seen.LOST:
            if not was_killed(attempt):
                return "a call that was lost without a reason"
            return "a call that was begun without its row" if attempt.status == 200 and not rows else ""


def _wrong_rows_of_one_key(same: Sequence[Attempt], rows: Sequence[Row], forgot: bool) -> str:
    """Whoever asks again under an Idempotency-Key gets the same answer, and pays once: for a whole one alone."""
    paid = [row for row in rows if row["status"] in CHARGED]
    if len(paid) > 1 or len(rows) > len(same):
        return "a key that was paid more than once"
    if any(row["status"] not in ("answered", "superseded", "failed") for row in rows):
        return "a key with a row that is neither whole nor free"
    for attempt in same:
        match attempt.seen:
            case Seen.HUNG | Seen.MUTE:
                return "a call that did not end honestly"
            case Seen.ANSWERED if [row["request_id"] for row in paid] != [attempt.request_id]:
                return "an answer under a key without its row"
            case Seen.ANSWERED if attempt.usage is not None and (wrong := _wrong_usage(attempt.usage, paid[0])):
                return wrong
            case Seen.REFUSED if LATER in attempt.error:
                continue  # it is told to come back for its answer, which may be there
            case Seen.REFUSED if forgot and LET_GO in attempt.error:
                continue  # whatever rows there are of it: none of them but one is paid
            case Seen.REFUSED if any(row["client_request_id"] == attempt.id for row in rows):
                return "a row for a refused call"
    return ""


def _wrong_usage(told: dict[str, Any], row: Row) -> str:
    cost = Fraction(told["cost_usd"]) * 10**9
    told_tokens = (told["prompt_tokens"], told["completion_tokens"], told["prompt_tokens_details"]["cached_tokens"])
    if cost == 0 and '"cached"' in row["attempts"]:
        told_tokens = (0, 0, 0)  # they were paid when the answer was made
    booked = (row["input_tokens"], row["output_tokens"], row["cached_input_tokens"])
    return "" if told_tokens == booked and cost == row["cost_nanousd"] else f"booked otherwise than told ({told})"


def check_costs(rows: Sequence[Row]) -> Iterator[str]:
    """Work out what every row's tokens cost, in fractions, and round once, up."""
    for row in rows:
        price_in, price_cached, price_out = MODELS[row["model_used"]][1]
        plain = row["input_tokens"] - row["cached_input_tokens"]
        exact = plain * price_in + row["cached_input_tokens"] * price_cached + row["output_tokens"] * price_out
        owed = ceil(Fraction(exact, 10**6)) if row["status"] in CHARGED else 0
        if owed != row["cost_nanousd"]:
            yield f"a row that costs {row['cost_nanousd']} and should cost {owed}: {row}"


async def compare_statements(connection: asyncpg.Connection, rows: Sequence[Row], teams: Sequence[str]) -> list[str]:
    """Add the rows up and hold the sums against the daily statements, line by line."""
    sums: dict[tuple[Any, ...], Counter[str]] = defaultdict(Counter)
    for row in rows:
        line = sums[tuple(row[name] for name in LINE)]
        line.update({name: row[name] for name in (*TOKENS, "cost_nanousd", "gpu_cost_nanousd")} | {"calls": 1})
    booked: dict[tuple[Any, ...], Counter[str]] = defaultdict(Counter)
    for row in await connection.fetch("SELECT * FROM usage_daily WHERE team_id = ANY($1)", teams):
        line = booked[tuple(row[name] for name in LINE)]
        line.update({name: row[name] for name in (*TOKENS, "cost_nanousd", "gpu_cost_nanousd", "calls")})
    return [
        f"statement line {line} says {dict(booked[line])}, its rows {dict(sums[line])}"
        for line in sorted(sums.keys() | booked.keys(), key=str)
        if +sums[line] != +booked[line]
    ]


async def compare_leases(connection: asyncpg.Connection, rows: Sequence[Row], teams: Sequence[str]) -> list[str]:
    """Add the rows up by scope and day, and hold the sums against what leases have spent; hold the balances against the
    leases. No lease has spent more than it has; under a cap no grant was forced, unless the database forgot some."""
    scopes = [f"team:{team}" for team in teams] + sorted({f"key:{row['key_id']}" for row in rows})
    owed, spent, drawn, found = _owed(rows), Counter[Room](), Counter[Room](), Counter[Room]()
    complaints = []
    may_overdraw = await has_forgotten(connection, teams)
    balances = await connection.fetch("SELECT * FROM balances WHERE scope = ANY($1)", scopes)
    capped = {(one["scope"], one["unit"]) for one in balances if one["cap"] is not None}
    for lease in await connection.fetch("SELECT * FROM leases WHERE scope = ANY($1)", scopes):
        scope, unit, day, left = lease["scope"], lease["unit"], str(lease["day"]), lease["granted"] - lease["returned"]
        spent[scope, unit, day] += lease["spent"]
        for period in (day, day[:7]) if unit == "nanousd" else (day,):
            drawn[scope, unit, period] += left
        is_strict = (scope, unit) in capped and not may_overdraw
        if lease["spent"] > left or (lease["overdrawn"] and is_strict):
            complaints.append(f"a lease that was overdrawn: {dict(lease)}")
    for balance in balances:
        found[balance["scope"], balance["unit"], balance["period"]] = balance["drawn"]
    for room in sorted(owed.keys() | spent.keys()):
        if owed[room] != spent[room]:
            complaints.append(f"leases of {room} say that {spent[room]} is spent, the ledger {owed[room]}")
    for room in sorted(drawn.keys() | found.keys()):
        if drawn[room] != found[room]:
            complaints.append(f"the balance of {room} says that {found[room]} is drawn, its leases {drawn[room]}")
    return complaints


async def check_slots(redis: Redis, teams: Sequence[str]) -> list[str]:
    """Look for slots of running calls that nothing has freed."""
    return [f"{team}: slots are taken: {taken}" for team in teams if (taken := await slots_of(redis, team))]


async def slots_of(redis: Redis, team: str) -> dict[str, int]:
    """Return the slots that each owner keeps for a team's running calls, and for those that it may admit by itself."""
    now = await redis.time()
    taken = {}
    found = cast(dict[bytes, bytes], await redis.hgetall(f"tollgate:{{{team}}}:rates:slots:team"))
    for owner, said in found.items():
        slots, until = said.split()
        if int(slots) and int(until) > now[0] * 1000:
            taken[owner.decode()] = int(slots)
    return taken


def _owed(rows: Sequence[Row]) -> Counter[Room]:
    """Return what leases should have spent."""
    owed = Counter[Room]()
    for row in rows:
        if row["status"] not in CHARGED:
            continue
        day = str(EPOCH + timedelta(milliseconds=int(row["request_id"].replace("-", "")[:12], 16)))
        for scope in (f"team:{row['team_id']}", f"key:{row['key_id']}"):
            owed[scope, "tokens", day] += row["input_tokens"] + row["output_tokens"]
            owed[scope, "nanousd", day] += row["cost_nanousd"]
    return owed


async def check_journals(connection: asyncpg.Connection, directory: Path) -> list[str]:
    """Look into every segment, kept ones too: no call is open, every closed one is in the ledger; and none that is not
    only kept is of the dead."""
    complaints = []
    for path in sorted(directory.iterdir()):
        if path.suffix == OWNER:  # PID-DICE.owner
            if not is_running(int(path.name.split("-")[0])):
                complaints.append(f"{path.name} is of a dead process")
            continue
        if path.suffix == ENDED:
            continue
        if path.suffix not in (SUFFIX, KEPT):
            complaints.append(f"a file in the journal that should not be there: {path.name}")
            continue
        try:
            opened, closed = _calls_in(path)
        except FileNotFoundError:
            continue
        query = "SELECT request_id::text FROM usage_records WHERE request_id = ANY($1::uuid[])"
        lacking = closed - {row["request_id"] for row in await connection.fetch(query, closed)}
        if opened:
            complaints.append(f"{path.name} has open calls: {sorted(opened)}")
        if lacking:
            complaints.append(f"{path.name} has calls that the ledger lacks: {sorted(lacking)}")
        if path.suffix == SUFFIX and not is_running(int(path.name.split("-")[1])):
            complaints.append(f"{path.name} is of a dead process")
    return complaints


def _calls_in(path: Path) -> tuple[set[str], set[str]]:
    opened, closed = set[str](), set[str]()
    with path.open("rb") as file:
        segment = Segment(path, file.fileno(), end=0, size=os.fstat(file.fileno()).st_size)
        for _, kind, body in segment.replay():
            record = msgspec.msgpack.decode(body)
            match kind:
                case Kind.OPENED:
                    opened.add(record["request_id"])
                case Kind.CLOSED:
                    opened.discard(record["request_id"])
                    closed.add(record["request_id"])
    return opened, closed
