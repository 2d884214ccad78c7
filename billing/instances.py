# What engine replicas cost us: the time that each was seen alive, and how much of it its calls account for. What no
# call accounts for is idle, a line of its own, so that calls + idle = instance-hours x price.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import date

from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

HOUR = 3_600_000_000  # microseconds
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
    hours: float  # instance-hours, for people to read: the cost is computed from microseconds
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
    span = {"first": first, "last": last}
    times = (await connection.execute(TIMES, span)).mappings().all()
    calls: dict[tuple[date, str], int] = defaultdict(int)
    names: dict[str, str] = {}
    for row in (await connection.execute(CALLS, span)).mappings():
        names[_address(row["endpoint"])] = row["endpoint"]
        calls[row["day"], _address(row["endpoint"])] += row["gpu_cost_nanousd"]
    lines: dict[str, InstanceCost] = {}
    for row, share in zip(times, _attribute(times, calls), strict=True):
        line = _line(row, share)
        lines[line.instance_id] = _sum(lines[line.instance_id], line) if line.instance_id in lines else line
    for row in times:
        calls.pop((row["day"], _address(row["endpoint"])), None)
    return [*lines.values(), *_unseen(calls, names)]


def price_of_time(microseconds: int, gpus: int, gpu_hour_nanousd: int) -> int:
    """Return what so much time of a replica costs, in nano-dollars, rounded once, half up."""
    return (2 * microseconds * gpus * gpu_hour_nanousd + HOUR) // (2 * HOUR)


def _attribute(times: Sequence[RowMapping], calls: Mapping[tuple[date, str], int]) -> list[int]:
    """Return each row's part of what the calls at its endpoint cost that day; the parts add up to it exactly."""
    together: dict[tuple[date, str], list[int]] = defaultdict(list)
    for place, row in enumerate(times):
        together[row["day"], _address(row["endpoint"])].append(place)
    parts = [0] * len(times)
    for key, places in together.items():
        busy = [times[place]["busy_us"] for place in places]
        weights = busy if any(busy) else [times[place]["alive_us"] for place in places]
        for place, part in zip(places, _share_out(calls.get(key, 0), weights), strict=True):
            parts[place] = part
    return parts


def _share_out(total: int, weights: Sequence[int]) -> list[int]:
    """Return whole parts of ``total`` in proportion to ``weights``, of which one at least is not 0."""
    parts, passed, given = [], 0, 0
    for weight in weights:
        passed += weight
        parts.append(total * passed // sum(weights) - given)
        given += parts[-1]
    return parts


def _line(row: RowMapping, attributed: int) -> InstanceCost:
    return InstanceCost(
        **{name: row[name] for name in ("instance_id", "provider", "endpoint", "model", "gpus")},
        hours=row["alive_us"] / HOUR,
        busy_hours=row["busy_us"] / HOUR,
        cost_nanousd=price_of_time(row["alive_us"], row["gpus"], row["gpu_hour_nanousd"]),
        attributed_nanousd=attributed,
    )


def _sum(line: InstanceCost, more: InstanceCost) -> InstanceCost:
    sums = ("hours", "busy_hours", "cost_nanousd", "attributed_nanousd")
    return replace(line, **{name: getattr(line, name) + getattr(more, name) for name in sums})


def _unseen(calls: Mapping[tuple[date, str], int], names: Mapping[str, str]) -> list[InstanceCost]:
    """Return a line for each endpoint with calls that cost something on a day on which nobody saw a replica there."""
    sums: dict[str, int] = defaultdict(int)
    for (_, address), cost in calls.items():
        sums[address] += cost
    return [
        InstanceCost(
            instance_id=UNSEEN,
            provider="",
            endpoint=names[address],
            model=None,
            gpus=0,
            hours=0.0,
            busy_hours=0.0,
            cost_nanousd=0,
            attributed_nanousd=sums[address],
        )
        for address in sorted(sums)
    ]


def _address(endpoint: str) -> str:
    """Return the base URL alone: a replica may answer under more than one region or provider."""
    return endpoint.rpartition(" ")[2]


TIMES = text("""
    SELECT day, instance_id, gpu_hour_nanousd, provider, endpoint, model, gpus, alive_us, busy_us
    FROM instance_days WHERE day BETWEEN :first AND :last ORDER BY endpoint, day, instance_id, gpu_hour_nanousd
""")
CALLS = text("SELECT day, endpoint, gpu_cost_nanousd FROM endpoint_days WHERE day BETWEEN :first AND :last")
