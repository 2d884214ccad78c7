# Series of calls, as charts draw them: a list of times, and a value of each metric for each, line by line. What is
# summed ties with the reports: a day's points add up to the report's day, but for what people booked, told beside it.

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from billing.ledger.series_queries import STEPS, Cell, SeriesQuery, read_corrections, read_percentile, read_sums
from gateway.accounts.serializers import dollars, moment
from gateway.reports.usage_analysis import see_one_moment
from gateway.reports.usage_report import added_up_by_call

Line = tuple[bool, str | None]  # all, or one by name; None: all that are not listed
ALL: Line = (True, None)


async def series(connection: AsyncConnection, asked: SeriesQuery) -> dict[str, Any]:
    """Return series in the shape of GET /v1/series. The connection's transaction has asked nothing yet.

    Raises BadRequest where there is too much to be added up in time.
    """
    await see_one_moment(connection)
    async with added_up_by_call(connection):
        return await _series(connection, asked)


async def _series(connection: AsyncConnection, asked: SeriesQuery) -> dict[str, Any]:
    found = await read_sums(connection, asked)
    named = [] if asked.by is None else [*found.names, *([None] if found.others else [])]
    lines: list[Line] = [ALL, *((False, name) for name in named)]
    shown = {line: _sums_of(asked, found.cells, line) for line in lines}
    for metric in asked.percentiles:
        measured = await read_percentile(connection, asked, metric, found.names)
        for line in lines:
            total, *values = (measured.get((*line, place)) for place in (None, *range(asked.points)))
            shown[line][metric] = {"total": total, "values": values}
    return {
        "object": "series",
        "step": asked.step,
        "from": moment(asked.since),
        "to": moment(asked.until),
        "by": asked.by,
        "percentile": asked.percentile if asked.percentiles else None,
        "times": [moment(asked.since + number * STEPS[asked.step]) for number in range(asked.points)],
        "data": [
            {str(asked.by): name, "others": found.others if name is None else 0, **shown[False, name]} for name in named
        ],
        "total": shown[ALL],
        "corrections": await _corrections(connection, asked),
    }


def _sums_of(asked: SeriesQuery, cells: Sequence[Cell], line: Line) -> dict[str, Any]:
    """Return the sums of a line, metric by metric: in all, and step by step."""
    of_all, name = line
    columns = [[0] * asked.points for _ in asked.sums]
    for cell in cells:
        if of_all or cell.name == name:
            for column, value in zip(columns, cell.values, strict=False):
                column[cell.place] += value
    return {
        metric: {"total": _value(metric, sum(column)), "values": [_value(metric, value) for value in column]}
        for metric, column in zip(asked.sums, columns, strict=True)
    }


def _value(metric: str, value: int) -> int | Decimal:
    return dollars(value) if metric.endswith("_usd") else value


async def _corrections(connection: AsyncConnection, asked: SeriesQuery) -> dict[str, Any] | None:
    booked = await read_corrections(connection, asked)
    if booked is None:
        return None
    inputs, outputs, cost = booked
    return {"input_tokens": inputs, "output_tokens": outputs, "tokens": inputs + outputs, "cost_usd": dollars(cost)}
