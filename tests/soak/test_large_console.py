# The console over ten million calls of a thousand teams, in a browser: how many requests each view makes, how long each
# takes, and whether its sums are those of /admin/report. The table lands in benchmarks/results/. Takes some ten minutes
# and 9 GB of disk; TOLLGATE_SOAK_ROWS=200000 tries it.

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from math import ceil
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx
import pytest
from sqlalchemy import text

import migrations
from billing.ledger import series
from billing.ledger.ledger import ROLLUP_KEY, SUMS
from billing.ledger.partitions import partition_of
from gateway.storage.database import Database
from tests.support.browser import Page, browser
from tests.support.house import ADMIN_KEY, House, serving, settings_for
from tests.support.temporary_stores import temporary_postgres, temporary_valkey

ROWS = int(os.environ.get("TOLLGATE_SOAK_ROWS", "10000000"))
DAYS, TEAMS = 31, 1000
TURNS = 3  # of which the median counts
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
NEEDED = 900 * ROWS  # bytes of disk, generously
QUICK = 1.0  # seconds: what takes longer is told
# Views as an admin opens them: name: query
VIEWS = [
    *[("overview", {"period": period}) for period in ("today", "7d", "30d", "month")],
    *[("overview", {"period": "30d", "by": by}) for by in ("model", "provider")],
    ("overview", {"period": "30d", "team": "team_7"}),
    *[("calls", {}), ("calls", {"period": "today"}), ("calls", {"period": "30d"})],
    *[("budgets", {}), ("teams", {}), ("teams", {"search": "team_77"}), ("finance", {}), ("models", {}), ("tools", {})],
    *[("batches", {}), ("fleet", {}), ("audit", {})],
]
# What calls are chosen by, over 30 days of all teams, and of one.
CHOICES: list[dict[str, str]] = [
    *[{"status": status} for status in ("answered", "failed", "refused", "interrupted")],
    *[{"model": "model-3"}, {"key": "key_7_1"}, {"user": "user-77"}, {"user": "none"}, {"metadata": "project:search"}],
    *[{"route_reason": "auto_small"}, {"min_cost_usd": "0.0099"}, {"limit": "200"}],
]
ASKED = """
    performance.getEntriesByType('resource').filter((each) => each.initiatorType === 'fetch' && each.responseEnd > 0)
        .map((each) => [each.name, each.duration])
"""

pytestmark = pytest.mark.soak


@pytest.mark.timeout(3600)
def test_the_console_stays_quick_over_ten_million_calls(tmp_path: Path) -> None:
    """At most eight requests to the first figures; no view asks more than four things; sums tie with the reports."""
    if shutil.disk_usage(tempfile.gettempdir()).free < NEEDED:
        pytest.skip(f"SKIPPED: {NEEDED / 1e9:.0f} GB of disk are needed")
    with filled() as (database_url, made), temporary_valkey() as valkey:
        settings = settings_for(database_url, valkey.url, "http://127.0.0.1:9/v1", tmp_path)
        with serving(settings) as url, (house := House(url, "", "", ADMIN_KEY, settings)).client(ADMIN_KEY) as admin:
            totals = list(compare_totals(admin))
            listed = list(look_at_lists(admin))
            print(totals, listed, sep="\n")
            with browser() as chromium:
                page = chromium.page()
                first = sign_in(page, house)
                views = [look_at(page, house, view, query) for view, query in VIEWS]
                faults = page.faults
    write_table(made, totals, views, listed, first)

    assert faults == []
    assert first <= 8
    assert [one for one in totals if one[1] != one[2]] == []
    assert [view for view in views if len(view[1]) > 4] == []


# ---- what the gateway had to make in 31 days


@contextmanager
def filled() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the URL of a filled database, and what is in it. TOLLGATE_SOAK_DATABASE: the URL of one that is filled."""
    if (kept := os.environ.get("TOLLGATE_SOAK_DATABASE")) is not None:
        yield kept, asyncio.run(count(kept))
        return
    with temporary_postgres(on_disk=True) as server:
        began = time.perf_counter()
        asyncio.run(generate(server.url))
        minutes = (time.perf_counter() - began) / 60
        yield server.url, {"minutes to fill it": round(minutes, 1)} | asyncio.run(count(server.url))


async def count(url: str) -> dict[str, Any]:
    """Return what is in a database."""
    database, found = Database(url), {}
    async with database.begin() as connection:
        await connection.execute(text("SET LOCAL statement_timeout = 0"))
        for name, query in COUNTED.items():
            raw = (await connection.get_raw_connection()).driver_connection
            assert raw is not None
            found[name] = await raw.fetchval(query, timeout=600)
    await database.close()
    return found


async def generate(url: str) -> None:
    """Fill the ledger a day at a time, with the sums and the series that flushers and chores would have made."""
    migrations.upgrade(url)
    now = datetime.now(UTC)
    database = Database(url)
    start = now - timedelta(days=DAYS - 1, seconds=now.timestamp() % 86_400)
    spacing, hour = (now - start) / ROWS, now.replace(minute=0, second=0, microsecond=0)
    async with database.begin() as connection:
        await connection.execute(text(f"INSERT INTO teams (id, name) {TEAM_NAMES}"))
    for number in range(DAYS):
        day = start + timedelta(days=number)
        first, last = (ceil((day + timedelta(days=more) - start) / spacing) for more in (0, 1))
        some = {"start": start, "spacing": spacing.total_seconds(), "first": first, "last": min(last, ROWS) - 1}
        if number < DAYS - 1:  # today's is there
            await run(database, MAKE.format(name=partition_of(day.date()), day=day.date(), next=day.date() + DAY))
        await run(database, CALLS, **some)
        await run(database, SUMMED, day=day.date())
        await run(database, SPENT, day=day.date())
        span = {"day": day.date(), "since": start, "until": hour}
        await run(database, HOURS, **span)
        await run(database, HOURS_OF_ALL, day=day.date())
        if day > now - series.MINUTES_KEPT - DAY:
            await run(database, SEALED_MINUTES, **span | {"since": now - series.MINUTES_KEPT})
    await run(database, MINUTES, day=now.date(), since=hour, until=now)
    await run(database, BALANCES)
    for table in ("usage_records", "usage_daily", "usage_series"):
        await run(database, f"ANALYZE {table}")
    await database.close()


async def run(database: Database, statement: Any, **values: Any) -> None:
    """Run a statement that may take long."""
    async with database.begin() as connection:
        for setting in ("statement_timeout = 0", "enable_nestloop = off", "work_mem = '256MB'"):
            await connection.execute(text(f"SET LOCAL {setting}"))
        raw = (await connection.get_raw_connection()).driver_connection
        assert raw is not None
        words, places = str(statement), []
        for name, value in values.items():
            if f":{name}" in words:
                places.append(value)
                words = words.replace(f":{name}", f"${len(places)}")
        await raw.execute(words, *places, timeout=1200)


DAY = timedelta(days=1)
TEAM_NAMES = f"SELECT 'team_' || n, 'Team ' || n FROM generate_series(0, {TEAMS - 1}) AS n"
MAKE = "CREATE TABLE IF NOT EXISTS {name} PARTITION OF usage_records FOR VALUES FROM ('{day}') TO ('{next}')"
# A team has two keys, each with a model that most of its calls are for; one call in twenty fails.
CALLS = f"""
    INSERT INTO usage_records (day, request_id, team_id, key_id, endpoint, model_asked, model_used, provider,
        provider_endpoint, tier, priority, status, input_tokens, cached_input_tokens, cache_write_tokens,
        output_tokens, reasoning_tokens, cost_nanousd, gpu_cost_nanousd, first_token_ms, total_ms, route_reason,
        attempts, user_tag, metadata, created_at)
    SELECT CAST(moment AT TIME ZONE 'UTC' AS date),
           CAST(lpad(to_hex(CAST(floor(extract(epoch FROM moment) * 1000) AS bigint)), 12, '0') || '7'
                || substr(dice, 1, 3) || '8' || substr(dice, 4, 15) AS uuid),
           'team_' || team, 'key_' || team || '_' || key, 'chat.completions', 'auto',
           'model-' || CASE WHEN n / 11 % 10 = 0 THEN n / 110 % 5 ELSE (team + key) % 5 END, 'openai',
           'us https://api.openai.com/v1', CASE WHEN n / 13 % 20 = 0 THEN 'batch' ELSE 'interactive' END, 'normal',
           CASE WHEN n / 17 % 20 = 0 THEN 'failed' ELSE 'answered' END, 50 + n % 3950, 0, 0, 1 + n % 900, 0,
           CASE WHEN n / 17 % 20 = 0 THEN 0 ELSE 10000 + n % 9990000 END, 0,
           CASE WHEN n / 17 % 20 = 0 THEN NULL ELSE 100 + n % 900 END, 500 + n % 9000,
           CASE WHEN key = 0 THEN 'named' ELSE 'auto_small' END,
           '[{{"target": "openai/us/model", "outcome": "ok", "ms": 412.5}}]', 'user-' || n / 7 % 5000,
           CASE WHEN n / 19 % 5 = 0 THEN CAST('{{"project": "search"}}' AS jsonb) END, moment
    FROM (SELECT CAST(n AS integer) AS n, n / 3 % 2 AS key, md5(CAST(n AS text)) AS dice,
                 CAST(n * 7919 % {TEAMS} AS integer) AS team,
                 CAST(:start AS timestamptz) + n * CAST(:spacing AS double precision) * interval '1 second' AS moment
          FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) AS n) AS calls
"""
SUMMED = f"""
    INSERT INTO usage_daily ({", ".join((*ROLLUP_KEY, *SUMS))})
    SELECT {", ".join(ROLLUP_KEY.values())}, count(*), {", ".join(f"sum({name})" for name in SUMS[1:])}
    FROM usage_records WHERE day = CAST(:day AS date) GROUP BY {", ".join(ROLLUP_KEY.values())}
"""
SPENT = """
    INSERT INTO leases (owner, scope, unit, day, granted, spent, overdrawn)
    SELECT '', scope, unit, CAST(:day AS date), amount, amount, amount FROM (
        SELECT scope, unit.name AS unit, CAST(sum(unit.amount) AS bigint) AS amount
        FROM usage_daily, LATERAL (VALUES ('team:' || team_id), ('key:' || key_id)) AS scopes (scope),
             LATERAL (VALUES ('tokens', input_tokens + output_tokens), ('nanousd', cost_nanousd)) AS unit (name, amount)
        WHERE day = CAST(:day AS date) AND status = 'answered' GROUP BY scope, unit.name
    ) AS spent
"""
BALANCES = """
    INSERT INTO balances (scope, unit, period, drawn)
    SELECT scope, unit, to_char(day, 'YYYY-MM-DD'), sum(granted) FROM leases GROUP BY scope, unit, day
    UNION ALL
    SELECT scope, unit, to_char(day, 'YYYY-MM'), sum(granted) FROM leases WHERE unit = 'nanousd' GROUP BY 1, 2, 3
"""
CHARTED = """
    INSERT INTO usage_series (at, step, code, {columns})
    SELECT date_trunc('{unit}', created_at, 'UTC'), {step}, '', {made} FROM usage_records
    WHERE day = CAST(:day AS date) AND created_at >= CAST(:since AS timestamptz)
          AND created_at < CAST(:until AS timestamptz)
    GROUP BY 1, {key}
"""
PARTS = {name: how for name, how in series.MADE.items() if name not in ("at", "step")}
WRITTEN = {"columns": ", ".join(PARTS), "made": ", ".join(PARTS.values()), "key": ", ".join(series.KEY[:-1])}
HOURS = CHARTED.format(unit="hour", step=series.HOUR, **WRITTEN)
SEALED_MINUTES = CHARTED.format(unit="minute", step=series.SEALED_MINUTE, **WRITTEN)
MINUTES = CHARTED.format(unit="minute", step=series.MINUTE, **WRITTEN)
HOURS_OF_DAY = "at >= CAST(:day AS date) AND at < CAST(:day AS date) + 1"
HOURS_OF_ALL = series.hours_of_all(f"SELECT * FROM usage_series WHERE step = {series.HOUR} AND {HOURS_OF_DAY}")
COUNTED = {
    "calls": "SELECT count(*) FROM usage_records",
    "lines of daily sums": "SELECT count(*) FROM usage_daily",
    "lines of series": "SELECT count(*) FROM usage_series",
    "MB on disk": "SELECT pg_database_size(current_database()) / 1000000",
}


# ---- looks


def compare_totals(admin: httpx.Client) -> Iterator[tuple[str, str, str]]:
    """Yield a period, and its calls and dollars by the console's series and by /admin/report."""
    today = datetime.now(UTC).date()
    for name, days in (("today", 0), ("7 days", 6), ("30 days", 29)):
        span = {"from": str(today - timedelta(days=days)), "to": str(today)}
        asked = {"metric": "cost_usd,requests,errors", "step": "day", "by": "team", **span}
        shown = admin.get("/admin/series", params=asked).raise_for_status().json()["total"]
        booked = admin.get("/admin/report", params=span).raise_for_status().json()["total"]
        series_of = f"{shown['requests']['total']:,} calls, ${float(shown['cost_usd']['total']):,.6f}"
        yield name, series_of, f"{booked['requests']:,} calls, ${float(booked['cost_usd']):,.6f}"


def look_at_lists(admin: httpx.Client) -> Iterator[tuple[str, float, str]]:
    """Yield a list of calls, its seconds, and what came: a page, the one after it, and each way to choose."""
    for team in (None, "team_7"):
        of = {} if team is None else {"team_id": team}
        for choice in ({}, *CHOICES):
            asked = {"from": str(datetime.now(UTC).date() - timedelta(days=29)), **of, **choice}
            seconds, page = median_of(admin, "/admin/calls", asked)
            more = (
                ""
                if page["next"] is None
                else f", on to {page['data'][-1]['created_at'][:16]}"
                if page["data"]
                else ", goes on"
            )
            yield f"/admin/calls?{urlencode(of | choice)}", seconds, f"{len(page['data'])} calls{more}"
            if not choice and page["next"]:
                asked["after"] = page["next"]
                seconds, page = median_of(admin, "/admin/calls", asked)
                yield f"/admin/calls?{urlencode(of)} and after", seconds, f"{len(page['data'])} calls"
    one = page["data"][0]["request_id"] if page["data"] else admin.get("/admin/calls").json()["data"][0]["request_id"]
    seconds, _ = median_of(admin, f"/admin/calls/{one}", {})
    yield "/admin/calls/{request_id}", seconds, "one call"


def median_of(admin: httpx.Client, path: str, asked: dict[str, str]) -> tuple[float, Any]:
    """Return the median seconds of some answers, and the last one."""
    taken = []
    for _ in range(TURNS):
        began = time.perf_counter()
        answer = admin.get(path, params=asked).raise_for_status()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken), answer.json()


def sign_in(page: Page, house: House) -> int:
    """Sign in as an admin; return how many requests it took until figures could show, the page's files among them."""
    page.open(f"{house.url}/console")
    page.fill("#key", house.admin_key)
    page.press("Enter")
    page.wait_text("Sign out")
    page.wait("Boolean(document.querySelector('.figures'))", within=60)
    return 1 + [urlsplit(url).path for url in page.asked].index("/admin/series")


def look_at(page: Page, house: House, view: str, query: dict[str, str]) -> tuple[str, list[tuple[str, float]]]:
    """Open a view several times; return its address, and what it asks for with the median seconds of each."""
    taken: dict[str, list[float]] = {}
    for _ in range(TURNS):
        page.asked.clear()
        page.open(f"{house.url}/console/{view}?{urlencode(query)}")
        page.wait("Boolean(document.querySelector('main h1 + *'))", within=60)
        until_quiet(page)
        slowest: dict[str, float] = {}  # of a path that is asked for twice: the period's, rather than the one before
        for name, ms in page.look(ASKED):
            slowest[urlsplit(name).path] = max(slowest.get(urlsplit(name).path, 0), ms / 1000)
        for path, seconds in slowest.items():
            taken.setdefault(path, []).append(seconds)
    asked = [(path, statistics.median(all_of_it)) for path, all_of_it in taken.items()]
    return f"{view}?{urlencode(query)}".rstrip("?"), asked


def until_quiet(page: Page) -> None:
    """Wait until the view has its data: what it has asked for is answered, and for half a second no more is."""
    end, quiet = time.monotonic() + 30, 0
    while quiet < 5 and time.monotonic() < end:
        asked = {urlsplit(url).path for url in page.asked if "/console" not in url and "/live" not in url}
        answered = {urlsplit(name).path for name, _ in page.look(ASKED)}
        quiet = quiet + 1 if asked - {"/admin/me"} and asked <= answered else 0
        time.sleep(0.1)


def write_table(
    made: dict[str, Any],
    totals: list[tuple[str, str, str]],
    views: list[tuple[str, list[tuple[str, float]]]],
    listed: list[tuple[str, float, str]],
    first: int,
) -> None:
    """Write what was measured where results are kept."""
    load = ", ".join(f"{each:.0f}" for each in os.getloadavg())
    slow = [f"{name} ({seconds:.1f} s)" for name, seconds, _ in listed if seconds > QUICK]
    slow += [
        f"{path} of {view} ({seconds:.1f} s)" for view, asked in views for path, seconds in asked if seconds > QUICK
    ]
    page = "\n".join(
        [
            f"# The console over ten million calls, {date.today()}\n",
            f"`python -m pytest -m soak tests/soak/test_large_console.py` on {os.cpu_count()} cores "
            f"({platform.machine()}), load average {load}, Postgres (32 MB of shared buffers), gateway and browser on "
            f"the same machine. {TEAMS:,} teams, {DAYS} days; medians of {TURNS}.\n",
            "| what | measured |\n| --- | --- |",
            *[f"| {name} | {value:,} |" for name, value in made.items()],
            f"| requests from the empty page to the first figures, files included | {first} |",
            f"| over a second | {'; '.join(slow) or 'nothing'} |\n",
            "| sums of | `/admin/series`, which the console shows | `/admin/report` |\n| --- | --- | --- |",
            *[f"| {name} | {shown} | {booked} |" for name, shown, booked in totals],
            "\n| view | asks for | seconds each |\n| --- | --- | --- |",
            *[line_of(view, asked) for view, asked in views],
            "\n| calls of 30 days | seconds | a page of |\n| --- | --- | --- |",
            *[f"| `{name}` | {seconds:.3f} | {what} |" for name, seconds, what in listed],
            "",
        ]
    )
    print(page)
    if ROWS >= 10_000_000:
        (RESULTS / f"large-console-{date.today()}.md").write_text(page)


def line_of(view: str, asked: list[tuple[str, float]]) -> str:
    """Return a view's line of the table."""
    paths, seconds = ", ".join(f"`{path}`" for path, _ in asked), ", ".join(f"{each:.3f}" for _, each in asked)
    return f"| `{view}` | {paths} | {seconds} |"
