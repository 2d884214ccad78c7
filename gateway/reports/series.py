# Series of calls, as charts draw them: a list of times, and a value of each metric for each, line by line. What is
# summed ties with the reports: a day's points add up to the report's day, but for what people booked, told beside it.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from msgspec.structs import replace
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.ledger.series import MINUTES_KEPT
from billing.ledger.series_queries import (
    DIMENSIONS,
    HISTOGRAMS,
    NOT_OF_DAYS,
    STEPS,
    SUMS,
    Cell,
    SeriesQuery,
    read_corrections,
    read_percentile,
    read_sums,
)
from gateway.accounts.serializers import dollars, moment
from gateway.reports.call_filter import STATUSES, read_moment
from gateway.reports.usage_analysis import see_one_moment
from gateway.reports.usage_report import added_up_by_call
from protocol.errors import invalid_value, missing_param

MOST_POINTS = 1500
MOST_METRICS, MOST_LINES, USUAL_LINES = 6, 50, 10
USUAL_PERIOD = {"minute": timedelta(hours=1), "hour": timedelta(hours=24), "day": timedelta(days=31)}
LONGEST_OF_ALL = timedelta(days=8)  # by team or key: every hour of every key is read
MOST_HOURS_OF_ALL = timedelta(days=2)  # of these, where lines by the day are asked for, which daily sums tell at once
FOR_ADMINS = frozenset({"gpu_cost_usd"})
CHOSEN = tuple(name for name in DIMENSIONS if name not in ("team", "code"))
NAMES = ("metric", "by", "step", "from", "to", "percentile", "top", "compare", *CHOSEN)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def read_series_query(said: Mapping[str, str], now: datetime, team_id: str | None, *, for_admin: bool) -> SeriesQuery:
    """Return what a query asks for. Raises BadRequest. Nothing said but ``metric``: the last 24 hours by the hour."""
    sums, percentiles = _metrics(said, for_admin=for_admin)
    step = _one_of("step", said.get("step", "hour"), tuple(STEPS))
    since, until = _span(said, step, now)
    if (status := said.get("status")) is not None:
        _one_of("status", status, STATUSES)
    chosen = {name: said[name] for name in CHOSEN if name in said}
    if team_id is not None:
        chosen["team"] = team_id
    asked = SeriesQuery(
        since=since,
        until=until,
        step=step,
        sums=sums,
        percentiles=percentiles,
        percentile=_number(said, "percentile", 95, 1, 99.9),
        by=_one_of("by", said["by"], tuple(DIMENSIONS)) if "by" in said else None,
        chosen=chosen,
        top=round(_number(said, "top", USUAL_LINES, 1, MOST_LINES)),
    )
    if _is_too_much(asked) and not _is_told_by_days(asked):
        words = f"is at most {_words(LONGEST_OF_ALL)} before 'to' by team or key, of all teams, but for sums by the day"
        raise invalid_value("from", f"{words}: name a team_id, or ask with step=day")
    if "compare" not in said:
        return asked
    _one_of("compare", said["compare"], ("before",))
    return replace(asked, before=_before(asked, now))


def _before(asked: SeriesQuery, now: datetime) -> SeriesQuery:
    """Return the query of as much time right before; of a period that runs, of as much of it as has passed."""
    width, shift = STEPS[asked.step], asked.until - asked.since
    since = asked.since - shift
    passed = min(asked.until, now + (EPOCH - now) % width) - shift
    if asked.step == "minute" and since < now - MINUTES_KEPT:
        raise invalid_value(
            "compare", f"reaches at most {_words(MINUTES_KEPT)} back with step=minute: ask for a longer step"
        )
    return replace(asked, since=since, until=max(passed, since + width), by=None)


def _is_too_much(asked: SeriesQuery, longest: timedelta = LONGEST_OF_ALL) -> bool:
    """Whether every hour of every key of a long time would be read."""
    is_of_all = asked.names_teams and "team" not in asked.chosen
    return is_of_all and not asked.reads_days and asked.until - asked.since > longest


def _is_told_by_days(asked: SeriesQuery) -> bool:
    """Whether daily sums tell the lines that every hour of every key would be read for."""
    return "key" not in asked.chosen and _of_days(asked).reads_days and _is_too_much(asked, MOST_HOURS_OF_ALL)


def _of_days(asked: SeriesQuery) -> SeriesQuery:
    """Return the part of a query that daily sums may answer."""
    return replace(asked, sums=tuple(name for name in asked.sums if name not in NOT_OF_DAYS), percentiles=())


def _metrics(said: Mapping[str, str], *, for_admin: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    offered = [name for name in (*SUMS, *HISTOGRAMS) if for_admin or name not in FOR_ADMINS]
    if "metric" not in said:
        words = f"'metric' is one of {', '.join(offered)}, or up to {MOST_METRICS} with commas between."
        raise missing_param("metric", f"Say which: {words}")
    names = said["metric"].split(",")
    for name in names:
        _one_of("metric", name, offered)
    if len(set(names)) < len(names) or len(names) > MOST_METRICS:
        raise invalid_value("metric", f"names up to {MOST_METRICS} different metrics")
    return tuple(name for name in names if name in SUMS), tuple(name for name in names if name in HISTOGRAMS)


def _span(said: Mapping[str, str], step: str, now: datetime) -> tuple[datetime, datetime]:
    """Return whole steps that cover what is asked for."""
    width = STEPS[step]
    until = read_moment(said["to"], "to", is_end=True) if "to" in said else now
    until += (EPOCH - until) % width  # to the border after it,
    since = read_moment(said["from"], "from") if "from" in said else until - USUAL_PERIOD[step]
    since -= (since - EPOCH) % width  # and to the one before
    if since >= until:
        raise invalid_value("to", "is not after 'from'")
    if (until - since) // width > MOST_POINTS:
        most = MOST_POINTS * width
        longer = "" if step == "day" else ", or ask for a longer step"
        raise invalid_value("from", f"is at most {_words(most)} before 'to' with step={step}{longer}")
    if step == "minute" and since < now - MINUTES_KEPT:
        raise invalid_value(
            "from", f"is at most {_words(MINUTES_KEPT)} ago with step=minute: then minutes become hours"
        )
    return since, until


def _words(time: timedelta) -> str:
    return f"{time.days} days" if time >= timedelta(days=3) else f"{time // timedelta(hours=1)} hours"


def _one_of(name: str, said: str, offered: tuple[str, ...] | list[str]) -> str:
    if said not in offered:
        raise invalid_value(name, f"is one of {', '.join(offered)}")
    return said


def _number(said: Mapping[str, str], name: str, usual: float, least: float, most: float) -> float:
    if name not in said:
        return usual
    try:
        found = float(said[name])
    except ValueError:
        found = -1.0
    if not least <= found <= most or (isinstance(most, int) and found != round(found)):
        raise invalid_value(name, f"is a {'whole ' if isinstance(most, int) else ''}number from {least} to {most}")
    return found


Line = tuple[bool, str | None]  # all, or one by name; None: all that are not listed
ALL: Line = (True, None)


async def series(connection: AsyncConnection, asked: SeriesQuery) -> dict[str, Any]:
    """Return series in the shape of GET /v1/series. The connection's transaction has asked nothing yet.

    Raises BadRequest where there is too much to be added up in time.
    """
    await see_one_moment(connection)
    async with added_up_by_call(connection):
        found = await (_series_of_days if _is_told_by_days(asked) else _series)(connection, asked)
        if asked.before is not None:
            before = await _series(connection, asked.before)
            found["before"] = {name: before[name] for name in ("from", "to", "total", "corrections")}
        return found


async def _series_of_days(connection: AsyncConnection, asked: SeriesQuery) -> dict[str, Any]:
    """Return what daily sums tell line by line, and of all lines together what hours alone know."""
    told = await _series(connection, _of_days(asked))
    rest = replace(asked, by=None, sums=tuple(name for name in asked.sums if name in NOT_OF_DAYS))
    of_all = await _series(connection, rest)
    unknown = {metric: {"total": None, "values": [None] * asked.points} for metric in of_all["total"]}
    return told | {
        "data": [line | unknown for line in told["data"]],
        "total": told["total"] | of_all["total"],
        "percentile": of_all["percentile"],
    }


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
