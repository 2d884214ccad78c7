# The tables of the money: one row per call, and their daily sums. Also the MetaData that all our tables share.
# A change here needs a file in migrations/versions/; a test compares the two.

from __future__ import annotations

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

from billing.core.records import COSTS, SAVINGS, TOKENS

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
IS_OF_VALUE = "scope ~ '^(user|tag):'"  # billing.core.holds.OF_VALUES

# Partitioned by ``day``, the UTC day inside the request id, so that a record delivered twice meets itself in one
# partition, and retention drops whole partitions. Days without a partition of their own fall into usage_records_rest.
usage_records = Table(
    "usage_records",
    metadata,
    Column("day", Date, primary_key=True),
    Column("request_id", Uuid, primary_key=True),
    Column("team_id", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("model_asked", Text, nullable=False),
    Column("model_used", Text, nullable=False),
    Column("provider", Text, nullable=False),
    Column("provider_endpoint", Text, nullable=False),
    Column("tier", Text, nullable=False),
    Column("priority", Text, nullable=False),
    Column("status", Text, nullable=False),  # billing.core.records.Status
    *[Column(name, Integer, nullable=False) for name in TOKENS],
    *[Column(name, BigInteger, nullable=False) for name in COSTS],
    *[Column(name, BigInteger, nullable=False, server_default=ZERO) for name in SAVINGS],
    Column("queue_ms", Double),
    Column("first_token_ms", Double),
    Column("prefill_ms", Double),
    Column("decode_ms", Double),
    Column("total_ms", Double, nullable=False),
    Column("route_reason", Text, nullable=False),
    Column("complexity", Double),
    Column("attempts", JSONB, nullable=False),  # [{"target", "outcome", "ms"}]
    Column("client_request_id", Text),
    Column("user_tag", Text),
    Column("metadata", JSONB),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("booked_on", Date),  # the day of booking, when ``day`` was already closed; else null
    Column("owner", Text, nullable=False, server_default=""),  # the process that held the call: owners.id
    Column("held_tokens", BigInteger, nullable=False, server_default=ZERO),
    Column("held_nanousd", BigInteger, nullable=False, server_default=ZERO),
    Column("units", JSONB),  # what was priced beside tokens: protocol.usage.UNITS
    Column("price", Text, nullable=False, server_default=""),  # price_editions.edition: what its cost was reckoned by
    Column("held_models", ARRAY(Text)),  # whose own limits the call held: of these its owner's leases know
    Column("held_scopes", ARRAY(Text)),  # scopes of its end user and its tags that the call held
    Column("left_out", JSONB),  # {model: [why it was not on the call's route]}; null: none was left out
    # The database holds every row to these facts (migrations, 0017): its day is that of its id, its status is known,
    # nothing is negative, and only a charged call costs.
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
    Column("team_id", Text, primary_key=True),
    Column("day", Date, primary_key=True),
    Column("booked_on", Date, primary_key=True),
    Column("key_id", Text, primary_key=True),
    Column("model_used", Text, primary_key=True),
    Column("tier", Text, primary_key=True),
    Column("status", Text, primary_key=True),
    *[Column(name, BigInteger, nullable=False, server_default=ZERO) for name in ("calls", *TOKENS, *COSTS, *SAVINGS)],
    Index("usage_daily_day_idx", "day"),
)

# Calls by the minute, for charts: each flush adds its part, in the transaction that inserts the rows, and changes none
# that is there; later parts become one, and make hours (billing.ledger.series). Refused calls are
# counted here too, beside the accounting.
usage_series = Table(
    "usage_series",
    metadata,
    Column("at", DateTime(timezone=True), nullable=False),  # when its minute or hour begins, by the moment in the id
    Column("step", SmallInteger, nullable=False),  # billing.ledger.series: MINUTE, SEALED_MINUTE, HOUR, HOUR_OF_ALL
    Column("team_id", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("model_used", Text, nullable=False),
    Column("provider", Text, nullable=False),
    Column("status", Text, nullable=False),  # billing.core.records.Status, or "refused"
    Column("tier", Text, nullable=False),
    Column("route_reason", Text, nullable=False),
    Column("code", Text, nullable=False, server_default=""),  # why calls were refused
    *[
        Column(name, BigInteger, nullable=False, server_default=ZERO)
        for name in ("calls", "cached", *TOKENS, *COSTS, *SAVINGS)
    ],
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
    Column("beat", BigInteger, nullable=False, server_default=ZERO),
    Column("started_at", DateTime(timezone=True), nullable=False),
    Column("seen_at", DateTime(timezone=True), nullable=False),
    Column("ended_at", DateTime(timezone=True)),  # its last segment is in the ledger, and its leases are given back
    Column("lost_at", DateTime(timezone=True)),  # not heard of for an hour: days close without it
    Column("set_again_at", DateTime(timezone=True)),  # when it last told its leases anew, after a failover
    Column("watermark", DateTime(timezone=True), nullable=False),
    Column("backlog", Integer, nullable=False, server_default=ZERO),
    Column("version", Text, nullable=False, server_default=""),
)

# When the database was last found to have forgotten what it had acknowledged: one row, or none.
failovers = Table(
    "failovers",
    metadata,
    Column("id", SmallInteger, primary_key=True, server_default=text("1")),
    Column("found_at", DateTime(timezone=True), nullable=False),
    CheckConstraint("id = 1", name="one_row"),
)

# What each scope may use of a period, and what of it the processes have drawn: drawn + corrected + grant <= cap.
balances = Table(
    "balances",
    metadata,
    Column("scope", Text(collation="C"), primary_key=True),  # billing.core.holds.Scope.name
    Column("unit", Text(collation="C"), primary_key=True),  # "tokens" or "nanousd"
    Column("period", Text(collation="C"), primary_key=True),  # "2026-11-22", or "2026-11" (money only)
    Column("cap", BigInteger),  # null: as much as it likes
    Column("drawn", BigInteger, nullable=False, server_default=ZERO),  # the sum of granted - returned of its leases
    Column("corrected", BigInteger, nullable=False, server_default=ZERO),  # signed
    Column("tight_since", DateTime(timezone=True)),  # while nothing is granted beyond the need
    Index("balances_tight_since_idx", "tight_since", postgresql_where=text("tight_since IS NOT NULL")),
    # Those of end users and tags, to count and to page through.
    Index("balances_period_scope_idx", "period", "scope", postgresql_where=text(f"unit = 'nanousd' AND {IS_OF_VALUE}")),
)

# What each process has drawn for a scope's day. All of it is cumulative: what is said twice changes nothing.
leases = Table(
    "leases",
    metadata,
    Column("owner", Text(collation="C"), primary_key=True),
    Column("scope", Text(collation="C"), primary_key=True),
    Column("unit", Text(collation="C"), primary_key=True),
    Column("day", Date, primary_key=True),
    Column("granted", BigInteger, nullable=False, server_default=ZERO),
    Column("returned", BigInteger, nullable=False, server_default=ZERO),
    Column("spent", BigInteger, nullable=False, server_default=ZERO),  # by rows of the ledger that name the owner
    Column("overdrawn", BigInteger, nullable=False, server_default=ZERO),  # of granted: what rows took beyond the lease
    Index("leases_scope_unit_day_idx", "scope", "unit", "day"),
)

# Chores that one process does for all: when each was last begun, and what came of it.
turns = Table(
    "turns",
    metadata,
    Column("name", Text, primary_key=True),
    Column("taken_at", DateTime(timezone=True), nullable=False),
    Column("told", Text, nullable=False, server_default=""),  # JSON
)

# Days whose accounts are closed: rows that come later carry ``booked_on``.
closed_days = Table(
    "closed_days",
    metadata,
    Column("day", Date, primary_key=True),
    Column("closed_at", DateTime(timezone=True), nullable=False),
)

# The first day whose rows the ledger has not dropped, once it has dropped some; one row. What is older is not inserted.
ledger_memory = Table(
    "ledger_memory",
    metadata,
    Column("id", SmallInteger, primary_key=True, server_default=text("1")),
    Column("begins", Date, nullable=False),
    CheckConstraint("id = 1", name="one_row"),
)

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
    Column("input_tokens", BigInteger, nullable=False),  # signed, as are the others
    Column("output_tokens", BigInteger, nullable=False),
    Column("cost_nanousd", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("actor", Text, nullable=False),  # as in the audit log
    Column("created_at", DateTime(timezone=True), nullable=False),
    Index("corrections_team_id_day_idx", "team_id", "day"),
    Index("corrections_day_idx", "day"),
)

# Engine replicas as they were last seen: their own counters since they started, so that what passed since can be told.
instances = Table(
    "instances",
    metadata,
    Column("instance_id", Text, primary_key=True),  # another one after every start
    Column("provider", Text, nullable=False),
    Column("endpoint", Text, nullable=False),  # usage_records.provider_endpoint
    Column("model", Text),  # its name in the catalogue, where it has one
    Column("gpus", Integer, nullable=False),
    Column("alive_us", BigInteger, nullable=False),  # microseconds since the start
    Column("busy_us", BigInteger, nullable=False),  # of these, in steps
    Column("first_seen", DateTime(timezone=True), nullable=False),
    Column("last_seen", DateTime(timezone=True), nullable=False),
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
    Column("provider", Text, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("model", Text),
    Column("gpus", Integer, nullable=False),
    Column("alive_us", BigInteger, nullable=False),
    Column("busy_us", BigInteger, nullable=False),
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
