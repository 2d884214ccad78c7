# What the processes ask of the database about leases: one statement each, repeatable, as the functions of the schema
# (migrations/first_functions.py) do it. A simulation speaks the same verbs.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import text

from billing.core.edges import Clock, Database
from billing.core.holds import OF_VALUES

TOKENS, NANOUSD = "tokens", "nanousd"  # units
TIGHT_CHANNEL = "tollgate_leases"  # the name of a scope is told there when one of its balances becomes tight
ALIVE = 10.0  # seconds since an owner was last seen, after which its share goes to the others
MOST_VALUES = 10_000  # end users, and as many values of tags, whose budgets a team's calls may open in a day
RESERVATIONS = "provider-batch:"  # what the names of owners begin with that are reservations, and no processes


class Need(Struct, frozen=True):
    """What one call needs of one room, beyond what its process has; ``hold`` is the whole of what it will hold."""

    scope: str
    unit: str
    need: int
    want: int
    hold: int
    is_first: bool = False  # its process has never had any of it


class LeaseRow(Struct, frozen=True, array_like=True):
    """A lease of this process as the database has it; cumulative."""

    scope: str
    unit: str
    granted: int
    returned: int
    spent: int


class Balance(Struct, frozen=True, array_like=True):
    """A capped balance. ``spent`` by rows and ``unused`` in leases of other living owners are told with refusals."""

    scope: str
    unit: str
    period: str
    cap: int
    drawn: int
    corrected: int
    tight_for: float | None = None  # seconds since it became tight
    spent: int | None = None
    unused: int | None = None


class Taken(Struct, frozen=True):
    """The answer to asks. ``refused``: why nothing could be given to any ("ended", "closed", "recovering", "clock")."""

    refused: str | None = None
    beat: int | None = None
    is_late: bool = False  # it was committed before it was on the disk, and is not told before it is there
    leases: list[LeaseRow] | None = None
    balances: list[Balance] | None = None
    # Scopes that were not made, as their team has as many as it may: their asks were not heard.
    beyond: Sequence[str] = ()


class Told(Struct, frozen=True):
    """How a lease stands by its owner's own figures: said to the database, as often as need be."""

    scope: str
    unit: str
    day: str
    granted: int
    returned: int


class Beat(Struct, frozen=True):
    """What a beat tells: how many the database remembers, its time, and what has changed."""

    beat: int
    now: float  # unix seconds
    living: int  # processes, the one that is told included
    found_at: float | None  # when an owner last found that the database forgot; unix seconds
    tight: list[str]  # scopes that have become tight lately
    # Which database tells this: when its server was started, and what it and our tables are to that, as one number.
    # Another one may be a replica or made from a backup, and lack what the last one knew.
    server: float = 0.0


class PostgresLeases:
    """What owners ask of Postgres about leases. Each verb raises what the database raises; whether it was done is then
    unknown. Who beats, asks or gives back has a deadline of his own.

    ``uses_server_time`` False: by the clock, for tests.
    """

    def __init__(self, database: Database, clock: Clock, *, uses_server_time: bool = True) -> None:
        self._database = database
        self._clock = clock
        self._uses_server_time = uses_server_time

    async def begin(self, owner: str, version: str) -> None:
        """List an owner."""
        async with self._database.at_once() as connection:
            await connection.execute(BEGIN, {"owner": owner, "version": version, "moment": self._moment()})

    async def beat(self, owner: str, watermark: float, backlog: int, holds: str | None = None) -> Beat | None:
        """Say that an owner lives, how far its journal is carried, and what its calls hold (Leases.holds). ``None``: it
        is not listed, or has ended."""
        values = {
            "owner": owner,
            "watermark": datetime.fromtimestamp(watermark, UTC),
            "backlog": backlog,
            "holds": holds,
            "moment": self._moment(),
            "alive": ALIVE,
            "reservations": f"{RESERVATIONS}%",
        }
        async with self._database.in_time() as connection:
            row = (await connection.execute(BEAT, values)).one_or_none()
        if row is None:
            return None
        found_at = None if row.found_at is None else float(row.found_at)
        return Beat(row.beat, float(row.now), row.living, found_at, list(row.tight or ()), float(row.server))

    async def take(self, owner: str, day: str, asks: Sequence[Sequence[Need]], share: float) -> Taken:
        """Draw room: for each ask all it needs or nothing.

        Of a tight balance the statement commits before the disk has it, so that all owners who want it do not wait for
        the disk one after the other; then this one waits for the disk, beside them.
        """
        beyond = await self._beyond(day, {need.scope for ask in asks for need in ask if need.is_first})
        if beyond:
            asks = [ask for ask in asks if not any(need.scope in beyond for need in ask)]
            if not asks:
                return Taken(beyond=beyond)
        needs = [(number, need) for number, ask in enumerate(asks) for need in ask]
        values = {
            "owner": owner,
            "day": day,
            "asks": [str(number) for number, _ in needs],
            "scopes": [need.scope for _, need in needs],
            "units": [need.unit for _, need in needs],
            "needs": [str(need.need) for _, need in needs],
            "wants": [str(need.want) for _, need in needs],
            "holds": [str(need.hold) for _, need in needs],
            "share": share,
            "moment": self._moment(),
            "clock": datetime.fromtimestamp(self._clock.now(), UTC),
        }
        async with self._database.in_time() as connection:
            taken = _decode_taken((await connection.execute(TAKE, values)).scalar_one())
            if taken.is_late:
                await connection.execute(REACH_THE_DISK)
            return replace(taken, beyond=beyond) if beyond else taken

    async def _beyond(self, day: str, first: Iterable[str]) -> Sequence[str]:
        """Return which of these scopes are of end users or tags that a team has too many of to count another one."""
        values = {"scopes": [scope for scope in first if scope.startswith(OF_VALUES)], "day": day, "most": MOST_VALUES}
        if not values["scopes"]:
            return ()
        async with self._database.in_time() as connection:
            return (await connection.execute(BEYOND, values)).scalars().all()

    async def give_back(self, owner: str, returns: Sequence[Told]) -> int | None:
        """Set what an owner has given back; return its beat, 0 if it was not counted, or ``None`` if it has ended."""
        return await self._tell(owner, returns, is_all=False)

    async def set_again(self, owner: str, leases: Sequence[Told]) -> int | None:
        """Tell all leases of an owner anew, after the database forgot."""
        return await self._tell(owner, leases, is_all=True)

    async def _tell(self, owner: str, leases: Sequence[Told], *, is_all: bool) -> int | None:
        values = {
            "owner": owner,
            "scopes": [one.scope for one in leases],
            "units": [one.unit for one in leases],
            "days": [one.day for one in leases],
            "grants": [str(one.granted) for one in leases],
            "returns": [str(one.returned) for one in leases],
            "is_all": is_all,
            "moment": self._moment(),
        }
        async with self._database.in_time() as connection:
            return (await connection.execute(TELL, values)).scalar_one()

    async def found_failover(self, known: float | None) -> float:
        """Note that the database forgot: nothing is granted until every living owner has told its leases again. Return
        when that was found, which may be by another owner, if later than ``known``."""
        values = {
            "moment": self._moment(),
            "known": None if known is None else datetime.fromtimestamp(known, UTC),
            "reservations": f"{RESERVATIONS}%",
        }
        async with self._database.at_once() as connection:
            return float((await connection.execute(FOUND, values)).scalar_one())

    async def end(self, owner: str) -> bool:
        """End an owner that is wholly in the ledger; false where it had ended, or never was."""
        async with self._database.at_once() as connection:
            return bool((await connection.execute(END, {"owner": owner, "moment": self._moment()})).scalar_one())

    def _moment(self) -> datetime | None:
        return None if self._uses_server_time else datetime.fromtimestamp(self._clock.now(), UTC)


_decode_taken = msgspec.json.Decoder(Taken).decode

BEGIN = text("""
    INSERT INTO owners (id, started_at, seen_at, watermark, version)
    SELECT :owner, moment, moment, moment, :version
    FROM (SELECT coalesce(CAST(:moment AS timestamptz), clock_timestamp()) AS moment) AS now
    ON CONFLICT (id) DO NOTHING
""")
BEAT = text("""
    UPDATE owners
    SET beat = beat + 1, seen_at = now.moment, watermark = :watermark, backlog = :backlog,
        holds = CAST(CAST(:holds AS text) AS jsonb)
    FROM (SELECT coalesce(CAST(:moment AS timestamptz), clock_timestamp()) AS moment) AS now
    WHERE id = :owner AND ended_at IS NULL
    RETURNING beat, extract(epoch FROM now.moment) AS now,
              (SELECT extract(epoch FROM found_at) FROM failovers) AS found_at,
              (SELECT count(*) FROM owners AS other WHERE other.id <> :owner AND other.ended_at IS NULL
                  AND other.seen_at > now.moment - make_interval(secs => :alive)
                  AND other.id NOT LIKE :reservations) + 1 AS living,
              extract(epoch FROM pg_postmaster_start_time())
                  + (SELECT CAST(oid AS bigint) FROM pg_database WHERE datname = current_database())
                  + CAST(CAST(CAST('owners' AS regclass) AS oid) AS bigint) AS server,
              (SELECT array_agg(DISTINCT scope) FROM balances WHERE tight_since > now.moment - interval '3 s') AS tight
""")
# Numbers travel as text: of all array types the driver knows that of texts by itself, and would look the others up in
# each new connection, which costs a slow database more than the statement.
TAKE = text("""
    SELECT CAST(take_room(
        :owner, :day, CAST(CAST(:asks AS text[]) AS integer[]), CAST(:scopes AS text[]), CAST(:units AS text[]),
        CAST(CAST(:needs AS text[]) AS bigint[]), CAST(CAST(:wants AS text[]) AS bigint[]),
        CAST(CAST(:holds AS text[]) AS bigint[]), :share,
        true, CAST(:moment AS timestamptz), CAST(:clock AS timestamptz)
    ) AS text)
""")
BEYOND = text("SELECT scopes_beyond(CAST(:scopes AS text[]), :day, CAST(:most AS bigint))")
TELL = text("""
    SELECT tell_leases(:owner, CAST(:scopes AS text[]), CAST(:units AS text[]), CAST(:days AS text[]),
                       CAST(CAST(:grants AS text[]) AS bigint[]), CAST(CAST(:returns AS text[]) AS bigint[]),
                       :is_all, CAST(:moment AS timestamptz))
""")
# A reservation has no process that tells its leases: nothing waits for it.
FOUND = text("""
    WITH now AS MATERIALIZED (SELECT coalesce(CAST(:moment AS timestamptz), clock_timestamp()) AS moment), told AS (
        UPDATE owners SET set_again_at = moment FROM now WHERE id LIKE :reservations AND ended_at IS NULL
    )
    INSERT INTO failovers (found_at) SELECT moment FROM now
    ON CONFLICT (id) DO UPDATE SET found_at =
        CASE WHEN failovers.found_at <= :known THEN excluded.found_at ELSE failovers.found_at END
    RETURNING extract(epoch FROM found_at)
""")
# A transaction that writes next to nothing: its commit waits for what was committed before it, too.
REACH_THE_DISK = text("SELECT pg_logical_emit_message(true, 'tollgate', '')")
END = text("SELECT end_owner(:owner, CAST(:moment AS timestamptz))")
