# `tollgate usage`: the report of GET /v1/usage as a table, JSON or CSV, from Postgres directly.

from __future__ import annotations

from typing import Annotated, Any

import typer
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.clock import Clock
from gateway.command_line import ConfigOption, Format, FormatOption, read_settings, run, say, show
from gateway.teams import get_team
from gateway.usage_report import read_period, usage_csv, usage_of, usage_rows
from protocol.errors import BadRequest

ALWAYS = ("model", "key", "tier", "day", "requests", "input_tokens", "cached_input_tokens", "output_tokens", "cost_usd")


def usage_command(
    team: Annotated[str, typer.Option(help="Whose usage")],
    date: Annotated[str | None, typer.Option(metavar="YYYY-MM-DD", help="A UTC day; default: today")] = None,
    since: Annotated[str | None, typer.Option("--from", metavar="YYYY-MM-DD", help="The first day of several")] = None,
    to: Annotated[str | None, typer.Option(metavar="YYYY-MM-DD", help="The last day; default: today")] = None,
    group_by: Annotated[str | None, typer.Option(metavar="model|key|tier|day", help="A line for each")] = None,
    config: ConfigOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Show what a team used and what it costs."""
    given = {"date": date, "from": since, "to": to, "group_by": group_by}
    try:
        asked = read_period({name: value for name, value in given.items() if value is not None}, Clock().today())
    except BadRequest as exc:
        raise typer.BadParameter(exc.message) from exc

    async def act(connection: AsyncConnection) -> dict[str, Any]:
        await get_team(connection, team)
        return await usage_of(connection, team, asked, for_house=True)

    usage = run(read_settings(config), act)
    if format is Format.CSV:
        say(usage_csv(usage).replace("\r\n", "\n").rstrip("\n"))
        return
    columns, rows = usage_rows(usage)
    if "results" in usage:
        columns = [name for name in columns if name not in ("team_id", "from", "to")]
        rows.append({columns[0]: "total", **usage["total"]})
    span = usage.get("date") or f"{usage['from']} to {usage['to']}"
    title = f"Usage of {team}, {span} (UTC){'' if usage['is_closed'] else ', not closed yet'}"
    columns = [name for name in columns if name in ALWAYS or any(row.get(name) for row in rows)]
    show(format, usage, [name for name in columns if name not in ("team_id", "date")], rows, title)
    late = usage.get("corrections") or usage.get("total", {}).get("corrections")
    if format is Format.TABLE and late:
        say(f"Corrections after the day was closed: {late['requests']} requests, {late['cost_usd']:f} USD.")
