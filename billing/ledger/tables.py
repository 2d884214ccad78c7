# The tables of the money: one row per call, and their daily sums. Also the MetaData that all our tables share.
# A change here needs a file in migrations/versions/; a test compares the two.

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Column,
    Date,
    DateTime,
    Double,
    Index,
    Integer,
    MetaData,
    SmallInteger,
    Table,
    Text,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from billing.core.records import COSTS, HEDGE, SAVINGS, TOKENS

metadata = MetaData(
    naming_convention={
        "pk": "%(table_name)s_pkey",
        "fk": "%(table_name)s_%(column_0_name)s_fkey",
        "uq": "%(table_name)s_%(column_0_N_name)s_key",
        "ix": "%(table_name)s_%(column_0_N_name)s_idx",
        "ck": "%(table_name)s_%(constraint_name)s_check",
    }
)

ZERO = text("0")


def _words(*names: str, is_key: bool = False, collation: str | None = None) -> list[Column[str]]:
    """Return columns of text that each row has."""
    return [Column(name, Text(collation=collation), primary_key=is_key, nullable=False) for name in names]


def _sums(*names: str) -> list[Column[int]]:
    """Return columns of whole numbers that begin at 0."""
    return [Column(name, BigInteger, nullable=False, server_default=ZERO) for name in names]


def _moments(*names: str) -> list[Column[datetime]]:
    """Return columns of moments that each row has."""
    return [Column(name, DateTime(timezone=True), nullable=False) for name in names]


IS_CALL = f"route_reason <> '{HEDGE}'"  # of rows: the second attempt at a call costs as a call does, and is none
IS_OF_VALUE = "scope ~ '^(user|tag):'"  # billing.core.holds.OF_VALUES


def _of_one_row(name: str, column: Column[Any]) -> Table:
    """Return a table that has one row, or none yet."""
    key = Column("id", SmallInteger, primary_key=True, server_default=text("1"))
    return Table(name, metadata, key, column, CheckConstraint("id = 1", name="one_row"))


# Partitioned by ``day``, the UTC day inside the request id, so that a record delivered twice meets itself in one
# partition, and retention drops whole partitions. Days without a partition of their own fall into usage_records_rest.
usage_records = Table(
    "usage_records",
    metadata,
    Column("day", Date, primary_key=True),
    Column("request_id", Uuid, primary_key=True),
    *_words("team_id", "key_id", "endpoint", "model_asked", "model_used", "provider", "provider_endpoint"),
    *_words("tier", "priority", "status"),  # billing.core.records.Status
    *[Column(name, Integer, nullable=False) for name in TOKENS],
    *[Column(name, BigInteger, nullable=False) for name in COSTS],
    *_sums(*SAVINGS),
    *[Column(name, Double) for name in ("queue_ms", "first_token_ms", "prefill_ms", "decode_ms")],
    Column("total_ms", Double, nullable=False),
    Column("route_reason", Text, nullable=False),
    Column("complexity", Double),
    Column("attempts", JSONB, nullable=False),  # [{"target", "outcome", "ms"}]
    Column("client_request_id", Text),
    Column("user_tag", Text),
    Column("metadata", JSONB),
    *_moments("created_at"),
    Column("booked_on", Date),  # the day of booking, when ``day`` was already closed; else null
    Column("owner", Text, nullable=False, server_default=""),  # the process that held the call: owners.id
    *_sums("held_tokens", "held_nanousd"),
    Column("units", JSONB),  # what was priced beside tokens: protocol.usage.UNITS
    Column("price", Text, nullable=False, server_default=""),  # price_editions.edition: what its cost was reckoned by
    Column("held_models", ARRAY(Text)),  # whose own limits the call held: of these its owner's leases know
    Column("held_scopes", ARRAY(Text)),  # scopes of its end user and its tags that the call held
    Column("left_out", JSONB),  # {model: [why it was not on the call's route]}; null: none was left out
    # The database holds every row to these facts (migrations/first_tables.py): its day is that of its id, its status is
    # known, nothing is negative, and only a charged call costs.
    Index("usage_records_team_id_request_id_idx", "team_id", "request_id"),
    postgresql_partition_by="RANGE (day)",
)

# What the editions of prices say that rows name, as JSON (billing.core.prices.Price).
price_editions = Table(
    "price_editions",
    metadata,
    Column("edition", Text, primary_key=True),
    Column("price", JSON, nullable=False),
)

# Sums over usage_records, kept in the transaction that inserts the rows. ``booked_on`` equals ``day`` but for rows that
# came after the day was closed: those are corrections, with sums of their own.
usage_daily = Table(
    "usage_daily",
    metadata,
    *_words("team_id", is_key=True),
    *[Column(name, Date, primary_key=True) for name in ("day", "booked_on")],
    *_words("key_id", "model_used", "tier", "status", is_key=True),
    *_sums("calls", *TOKENS, *COSTS, *SAVINGS),
    Index("usage_daily_day_idx", "day"),
)

# Calls by the minute, for charts: each flush adds its part, in the transaction that inserts the rows, and changes none
# that is there; later parts become one, and make hours (billing.ledger.series). Refused calls are
# counted here too, beside the accounting.
usage_series = Table(
    "usage_series",
    metadata,
    Column("at", DateTime(timezone=True), nullable=False),  # when its minute or hour begins, by the moment in the id
    Column("step", SmallInteger, nullable=False),  # billing.ledger.series: MINUTE, HOUR, …
    *_words("team_id", "key_id", "model_used", "provider"),
    *_words("status", "tier", "route_reason"),  # billing.core.records.Status, or "refused"
    Column("code", Text, nullable=False, server_default=""),  # why calls were refused
    *_sums("calls", "cached", *TOKENS, *COSTS, *SAVINGS),
    Column("first_token", ARRAY(BigInteger)),  # a histogram: billing.ledger.series.bucket_of
    Column("total", ARRAY(BigInteger)),  # likewise, of all the time of each call
    Index("usage_series_step_at_idx", "step", "at"),
    Index("usage_series_team_id_at_idx", "team_id", "at"),
)

# The processes that hold and book calls, one row a start: that it lives, and how far it has carried its journal (every
# call that it opened before ``watermark`` is in usage_records). ``beat`` counts what it was told is committed.
owners = Table(
    "owners",
    metadata,
    Column("id", Text, primary_key=True),
    *_sums("beat"),
    *_moments("started_at", "seen_at"),
    Column("ended_at", DateTime(timezone=True)),  # its last segment is in the ledger, and its leases are given back
    Column("lost_at", DateTime(timezone=True)),  # not heard of for an hour: days close without it
    Column("set_again_at", DateTime(timezone=True)),  # when it last told its leases anew, after a failover
    *_moments("watermark"),
    Column("backlog", Integer, nullable=False, server_default=ZERO),
    Column("version", Text, nullable=False, server_default=""),
    # Of its leases that running calls hold a part of, "scope unit day": used and held; null: that is not told.
    Column("holds", JSONB),
)

# When the database was last found to have forgotten what it had acknowledged: one row, or none.
failovers = _of_one_row("failovers", _moments("found_at")[0])

# What each scope may use of a period, and what of it the processes have drawn: drawn + corrected + grant <= cap.
balances = Table(
    "balances",
    metadata,
    # billing.core.holds.Scope.name; "tokens" or "nanousd"; "2026-11-22", or "2026-11" (money only)
    *_words("scope", "unit", "period", is_key=True, collation="C"),
    Column("cap", BigInteger),  # null: as much as it likes
    *_sums("drawn", "corrected"),  # the sum of granted - returned of its leases; signed
    Column("tight_since", DateTime(timezone=True)),  # while nothing is granted beyond the need
    Index("balances_tight_since_idx", "tight_since", postgresql_where=text("tight_since IS NOT NULL")),
    # Those of end users and tags, to count and to page through.
    Index("balances_period_scope_idx", "period", "scope", postgresql_where=text(f"unit = 'nanousd' AND {IS_OF_VALUE}")),
)

# What each process has drawn for a scope's day. All of it is cumulative: what is said twice changes nothing.
leases = Table(
    "leases",
    metadata,
    *_words("owner", "scope", "unit", is_key=True, collation="C"),
    Column("day", Date, primary_key=True),
    # spent: by rows of the ledger that name the owner; overdrawn: what of ``granted`` rows took beyond the lease
    *_sums("granted", "returned", "spent", "overdrawn"),
    Index("leases_scope_unit_day_idx", "scope", "unit", "day"),
)

# Chores that one process does for all: when each was last begun, and what came of it.
turns = Table(
    "turns",
    metadata,
    Column("name", Text, primary_key=True),
    *_moments("taken_at"),
    Column("told", Text, nullable=False, server_default=""),  # JSON
)

# Days whose accounts are closed: rows that come later carry ``booked_on``.
closed_days = Table(
    "closed_days",
    metadata,
    Column("day", Date, primary_key=True),
    *_moments("closed_at"),
    Column("summed_at", DateTime(timezone=True)),  # when its calls were added up by what they asked for
)

# Charged calls of closed days by the name that they asked for, those that came late left out; by what share of a
# hundred a small model would have sufficed, where a call that named a model was asked (-1: it was not).
usage_asked = Table(
    "usage_asked",
    metadata,
    Column("day", Date, primary_key=True),
    *_words("team_id", "model_asked", "tier", is_key=True),
    Column("score", SmallInteger, primary_key=True, autoincrement=False),
    *_sums("requests", *TOKENS, "cost_nanousd"),
)

# The first day whose rows the ledger has not dropped, once it has dropped some; one row. What is older is not inserted.
ledger_memory = _of_one_row("ledger_memory", Column("begins", Date, nullable=False))

# What was booked by hand beside the calls, with who and why. Entries are only added: a wrong one is put right by
# another.
corrections = Table(
    "corrections",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("team_id", Text, nullable=False),
    Column("day", Date, nullable=False),  # the UTC day that is corrected
    Column("booked_on", Date, nullable=False),  # the UTC day on which it was booked
    Column("key_id", Text),
    Column("model_used", Text),
    Column("tier", Text),  # of the call, when one is corrected
    Column("request_id", Uuid),  # the call that is corrected, when it is one
    *[Column(name, BigInteger, nullable=False) for name in ("input_tokens", "output_tokens", "cost_nanousd")],  # signed
    *_words("reason", "actor"),  # as in the audit log
    *_moments("created_at"),
    Index("corrections_team_id_day_idx", "team_id", "day"),
    Index("corrections_day_idx", "day"),
)


def _replica() -> list[Column[Any]]:
    """Return what is told of an engine replica: what it serves, and microseconds of its life, and of these in steps."""
    model = (
        Column("model", Text),
        Column("gpus", Integer, nullable=False),
    )  # its name in the catalogue, where it has one
    times = [Column(name, BigInteger, nullable=False) for name in ("alive_us", "busy_us")]
    return [*_words("provider", "endpoint"), *model, *times]  # usage_records.provider_endpoint


# Engine replicas as they were last seen: their own counters since they started, so that what passed since can be told.
instances = Table(
    "instances",
    metadata,
    Column("instance_id", Text, primary_key=True),  # another one after every start
    *_replica(),
    *_moments("first_seen", "last_seen"),
    Column("load", JSONB, nullable=False),  # the engine's last report
    Index("instances_last_seen_idx", "last_seen"),
)

# The time of each replica on each UTC day, by the price that a GPU-hour had; replicas without a price have no rows.
instance_days = Table(
    "instance_days",
    metadata,
    Column("instance_id", Text, primary_key=True),
    Column("day", Date, primary_key=True),
    Column("gpu_hour_nanousd", BigInteger, primary_key=True),
    *_replica(),
    Index("instance_days_day_idx", "day"),
)

# What the calls of each day cost us at each endpoint, kept in the transaction that inserts their rows.
endpoint_days = Table(
    "endpoint_days",
    metadata,
    Column("day", Date, primary_key=True),
    Column("endpoint", Text, primary_key=True),  # usage_records.provider_endpoint
    Column("gpu_cost_nanousd", BigInteger, nullable=False),
)
