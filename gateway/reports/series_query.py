# What a query for series asks for, read and bounded: metrics, lines, steps and the time that they cover.

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from billing.ledger.series import MINUTES_KEPT
from billing.ledger.series_queries import DIMENSIONS, HISTOGRAMS, STEPS, SUMS, SeriesQuery
from gateway.reports.call_filter import STATUSES, read_moment
from protocol.errors import BadRequest, invalid_value

MOST_POINTS = 1500
MOST_METRICS, MOST_LINES, USUAL_LINES = 6, 50, 10
USUAL_PERIOD = {"minute": timedelta(hours=1), "hour": timedelta(hours=24), "day": timedelta(days=31)}
LONGEST_OF_ALL = timedelta(days=8)  # by team or key: every hour of every key is read
FOR_ADMINS = frozenset({"gpu_cost_usd"})
CHOSEN = tuple(name for name in DIMENSIONS if name not in ("team", "code"))
NAMES = ("metric", "by", "step", "from", "to", "percentile", "top", *CHOSEN)
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
    if asked.names_teams and "team" not in chosen and not asked.reads_days and until - since > LONGEST_OF_ALL:
        words = f"is at most {_words(LONGEST_OF_ALL)} before 'to' by team or key, of all teams, but for sums by the day"
        raise invalid_value("from", f"{words}: name a team_id, or ask with step=day")
    return asked


def _metrics(said: Mapping[str, str], *, for_admin: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    offered = [name for name in (*SUMS, *HISTOGRAMS) if for_admin or name not in FOR_ADMINS]
    if "metric" not in said:
        raise BadRequest(
            f"Say which: 'metric' is one of {', '.join(offered)}, or up to {MOST_METRICS} with commas between.",
            param="metric",
            code="missing_required_parameter",
        )
    names = said["metric"].split(",")
    for name in names:
        _one_of("metric", name, offered)
    if len(set(names)) < len(names) or len(names) > MOST_METRICS:
        raise invalid_value("metric", f"names up to {MOST_METRICS} different metrics")
    return tuple(name for name in names if name in SUMS), tuple(name for name in names if name in HISTOGRAMS)


def _span(said: Mapping[str, str], step: str, now: datetime) -> tuple[datetime, datetime]:
    """Return whole steps that cover what is asked for."""
    width = STEPS[step]
    until = _border_after(read_moment(said["to"], "to", is_end=True) if "to" in said else now, width)
    since = _border_before(read_moment(said["from"], "from") if "from" in said else until - USUAL_PERIOD[step], width)
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


def _border_before(moment: datetime, width: timedelta) -> datetime:
    return moment - (moment - EPOCH) % width


def _border_after(moment: datetime, width: timedelta) -> datetime:
    return moment + (EPOCH - moment) % width


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
