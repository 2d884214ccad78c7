# `tollgate calls`: the calls of a team, or of all, as GET /v1/calls has them, newest first, and as they come.

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any

import typer

from gateway.commands.command_line import Format, FormatOption, read_settings, run, say, show
from gateway.config.paths import ConfigOption
from gateway.core.clock import Clock
from gateway.core.settings import Settings
from gateway.reports.call_filter import CallFilter, read_filter
from gateway.reports.call_list import list_calls
from protocol.errors import BadRequest

COLUMNS = (
    *("created_at", "request_id", "team_id", "status", "code"),
    *("model_used", "output_tokens", "cost_usd", "total_ms"),
)
LOOK_AGAIN, LOOK_BACK = 1.0, 60.0  # seconds; a call's row may come some seconds after the call


def command(
    team: Annotated[str | None, typer.Option(help="Whose calls; default: everyone's")] = None,
    key: Annotated[str | None, typer.Option(help="Of this key (key_…) alone")] = None,
    model: Annotated[str | None, typer.Option(help="That asked for this model, or were answered by it")] = None,
    status: Annotated[
        str | None, typer.Option(metavar="answered|interrupted|failed|blocked|superseded|refused", help="That ended so")
    ] = None,
    user: Annotated[str | None, typer.Option(help="That named this user")] = None,
    metadata: Annotated[str | None, typer.Option(metavar="KEY:VALUE", help="With this in their metadata")] = None,
    min_cost_usd: Annotated[str | None, typer.Option(metavar="USD", help="That cost as much")] = None,
    since: Annotated[str | None, typer.Option("--from", help="A UTC day or moment; default: 31 days ago")] = None,
    to: Annotated[str | None, typer.Option(help="A UTC day or moment; default: now")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200, help="How many, the newest")] = 20,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what comes, until Ctrl-C")] = False,
    config: ConfigOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Show calls one by one, newest first, refused ones too; `tollgate explain REQUEST_ID` tells all of one."""
    settings = read_settings(config)
    given = {"key": key, "model": model, "status": status, "user": user, "metadata": metadata, "from": since, "to": to}
    given |= {"min_cost_usd": min_cost_usd, "limit": str(limit)}
    said = {name: value for name, value in given.items() if value is not None}
    page = _page(settings, said, team)
    if not follow:
        show(format, page, COLUMNS, page["data"], "Calls, newest first (UTC)")
        return
    seen: dict[str, None] = {}
    while True:
        for call in reversed(page["data"]):
            if call["request_id"] not in seen:
                seen[call["request_id"]] = None
                say("\t".join(str("" if call.get(name) is None else call[name]) for name in COLUMNS))
        for request_id in list(seen)[:-1000]:
            del seen[request_id]
        time.sleep(LOOK_AGAIN)
        page = _page(settings, said | {"limit": "200"}, team, within=LOOK_BACK)


def _page(settings: Settings, said: Mapping[str, str], team: str | None, within: float | None = None) -> dict[str, Any]:
    """Return a page; with ``within``, of the last so many seconds."""
    clock = Clock()
    if within is not None and "from" not in said:
        said = {**said, "from": (clock.moment() - timedelta(seconds=within)).isoformat()}
    try:
        wanted: CallFilter = read_filter(said, clock.moment(), team)
    except BadRequest as exc:
        raise typer.BadParameter(exc.message) from exc
    return run(settings, lambda connection: list_calls(connection, wanted))
