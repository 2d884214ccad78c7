# What engine replicas cost us: the time that each was seen alive, and how much of it its calls account for. What no
# call accounts for is idle, a line of its own, so that calls + idle = instance-hours x price.

from __future__ import annotations

from datetime import date

from msgspec import Struct
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

HOUR = 3_600_000_000  # microseconds
NAMES = ("provider", "endpoint", "model", "gpus")
UNSEEN = ""  # the instance id of calls that were answered where no replica was seen


class InstanceCost(Struct, frozen=True, kw_only=True):
    """What one replica cost over the days asked for. Money is nano-dollars.

    ``cost = attributed + idle``, to the nano-dollar. A call is booked on the day on which it began and time on the day
    on which it passed, so ``idle`` of a single day may fall slightly below zero; over the days together it does not.
    """

    instance_id: str  # UNSEEN: no replica was seen at this endpoint on a day on which it answered calls
    provider: str
    endpoint: str  # region and base URL, as in usage_records.provider_endpoint
    model: str | None  # its name in the catalogue
    gpus: int
    hours: float  # instance-hours, to be read: the cost is computed from microseconds
    busy_hours: float  # of these, in steps
    cost_nanousd: int  # hours x gpus x the price of the time, rounded once for each day and price
    attributed_nanousd: int  # what the rows of its calls in the ledger say they cost us

    @property
    def idle_nanousd(self) -> int:
        """What no call accounts for."""
        return self.cost_nanousd - self.attributed_nanousd


async def idle_costs(connection: AsyncConnection, first: date, last: date) -> list[InstanceCost]:
    """Return a line for each replica that was alive in the UTC days from ``first`` to ``last``, both included.

    The sum of ``attributed_nanousd`` over all lines is the sum of ``gpu_cost_nanousd`` over all rows of these days;
    with the sum of ``idle_nanousd`` it is the sum of ``cost_nanousd``: instance-hours x price. A replica whose model
    has no ``gpu_hour`` has no line. Replicas at one endpoint share what its calls cost by their time in steps, day by
    day. It reads daily sums alone, a few rows for each replica and day.
    """
    rows = await connection.execute(COSTS, {"first": first, "last": last})
    return [InstanceCost(**row) for row in rows.mappings()]


# The base URL alone: a replica may answer under more than one region or provider.
ADDRESS = "substring(endpoint FROM '[^ ]*$')"

# Each row's part of what the calls at its address cost that day is whole, and the parts add up to it exactly: they go
# by the time in steps up to each row, or by the time alive where no replica was busy.
COSTS = text(f"""
    WITH call AS (
        SELECT day, {ADDRESS} AS address, max(endpoint) AS endpoint, sum(gpu_cost_nanousd) AS cost
        FROM endpoint_days WHERE day BETWEEN :first AND :last GROUP BY 1, 2
    ), time AS (
        SELECT *, {ADDRESS} AS address,
               CASE WHEN sum(busy_us) OVER (PARTITION BY day, {ADDRESS}) > 0 THEN busy_us ELSE alive_us END AS weight
        FROM instance_days WHERE day BETWEEN :first AND :last
    ), passed AS (
        SELECT *, sum(weight) OVER here AS whole,
               sum(weight) OVER (here ORDER BY instance_id, gpu_hour_nanousd) AS until
        FROM time WINDOW here AS (PARTITION BY day, address)
    ), line AS (
        SELECT instance_id, false AS is_unseen,
               {", ".join(f"(array_agg(passed.{n} ORDER BY passed.endpoint, day))[1] AS {n}" for n in NAMES)},
               CAST(sum(alive_us) AS double precision) / {HOUR} AS hours,
               CAST(sum(busy_us) AS double precision) / {HOUR} AS busy_hours,
               sum(div(2 * CAST(alive_us AS numeric) * gpus * gpu_hour_nanousd + {HOUR}, 2 * {HOUR})) AS cost,
               sum(div(coalesce(cost, 0) * until, whole) - div(coalesce(cost, 0) * (until - weight), whole)) AS part
        FROM passed LEFT JOIN call USING (day, address) GROUP BY instance_id
        UNION ALL
        SELECT '{UNSEEN}', true, '', max(endpoint), NULL, 0, 0, 0, 0, sum(cost) FROM call
        WHERE NOT EXISTS (SELECT FROM time WHERE time.day = call.day AND time.address = call.address)
        GROUP BY address
    )
    SELECT instance_id, {", ".join(NAMES)}, hours, busy_hours,
           CAST(cost AS bigint) AS cost_nanousd, CAST(part AS bigint) AS attributed_nanousd
    FROM line ORDER BY is_unseen, endpoint, instance_id
""")  # noqa: S608  (columns are ours)
