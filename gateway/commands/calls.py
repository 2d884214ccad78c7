# `tollgate calls`: the calls of a team, or of all, as GET /v1/calls has them, newest first, and as they come.

from __future__ import annotations

import csv
import io
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any

import msgspec
import typer
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.ids import least_id
from gateway.accounts.teams import check_team
from gateway.commands.command_line import attempt, read_settings
from gateway.core.clock import Clock
from gateway.core.settings import Settings
from gateway.reports.call_filter import CallFilter, read_filter
from gateway.reports.call_list import list_calls
from gateway.reports.csv_text import as_text
from gateway.terminal.options import WhereByApiKey, with_options
from gateway.terminal.printing import Format, fail, printable, say, show, text_of
from gateway.terminal.remote_gateway import GatewayFault, RemoteGateway, remote_gateway
from protocol.errors import BadRequest

COLUMNS = (
    *("created_at", "request_id", "team_id", "status", "code"),
    *("model_used", "output_tokens", "cost_usd", "total_ms"),
)
LOOK_AGAIN, LOOK_BACK = 1.0, 60.0  # seconds; a call is listed by when it began, and may end a minute later
THOROUGH = 10  # looks, of which one goes through all of the last minute; the others end where nothing is new


@with_options
def command(
    *,
    team: Annotated[str | None, typer.Option(help="Whose calls; default: everyone's")] = None,
    of_key: Annotated[str | None, typer.Option("--key", help="Of this key (key_…) alone")] = None,
    model: Annotated[str | None, typer.Option(help="That asked for this model, or were answered by it")] = None,
    status: Annotated[
        str | None, typer.Option(metavar="answered|interrupted|failed|blocked|superseded|refused", help="That ended so")
    ] = None,
    route_reason: Annotated[str | None, typer.Option(help="That were routed so, such as auto_small")] = None,
    user: Annotated[str | None, typer.Option(help="That named this user")] = None,
    metadata: Annotated[str | None, typer.Option(metavar="KEY:VALUE", help="With this in their metadata")] = None,
    min_cost_usd: Annotated[str | None, typer.Option(metavar="USD", help="That cost as much")] = None,
    min_ms: Annotated[int | None, typer.Option(min=0, metavar="MS", help="That took as long, waiting included")] = None,
    since: Annotated[str | None, typer.Option("--from", help="A UTC day or moment; default: 31 days ago")] = None,
    to: Annotated[str | None, typer.Option(help="A UTC day or moment; default: now")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200, help="How many, the newest")] = 20,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what comes, until Ctrl-C")] = False,
    where: WhereByApiKey,
) -> None:
    """Show calls one by one, newest first, refused ones too; `tollgate explain REQUEST_ID` tells all of one."""
    given = {
        "key": of_key,
        "model": model,
        "status": status,
        "route_reason": route_reason,
        "user": user,
        "metadata": metadata,
        "from": since,
        "to": to,
    }
    given |= {"min_cost_usd": min_cost_usd, "min_ms": min_ms if min_ms is None else str(min_ms), "limit": str(limit)}
    said = {name: value for name, value in given.items() if value is not None}
    if where.is_elsewhere:
        with remote_gateway(where.url, where.key) as gateway:
            _show(lambda wanted: _remote_page(gateway, wanted, team), said, follow, where.format)
        return
    settings = read_settings(where.config)
    try:
        _show(lambda wanted: _page(settings, wanted, team), said, follow, where.format)
    except GatewayFault as exc:
        fail(str(exc), exc.status)


def _show(page_of: Callable[[Mapping[str, str]], Any], said: Mapping[str, str], follow: bool, format: Format) -> None:
    """Print a page; with ``follow``, each call as it comes, by looking at the last minute again and again.

    An outage is said once; what came in it is found by looking back to before it, until a minute after it.
    """
    page = page_of(said)
    if not follow:
        show(format, page, COLUMNS, page["data"], "Calls, newest first (UTC)")
        return
    seen: set[str] = set()
    newest = page["data"][0]["request_id"] if page["data"] else ""
    calls, looks = new_calls(lambda _: {**page, "next": None}, said, seen), 0
    if format is not Format.JSON:
        say(in_line(COLUMNS, format))
    looked = steady = Clock().moment()  # when all was seen, and from when an outage is over
    is_away = False
    while True:
        for call in reversed(calls):
            say(as_line(call, format))
        sys.stdout.flush()
        time.sleep(LOOK_AGAIN if looks or is_away else 0.0)
        now = Clock().moment()
        since = (looked - timedelta(seconds=LOOK_BACK)).isoformat()
        is_thorough = looks % THOROUGH == 0
        try:
            found = new_calls(page_of, {"from": since, **said, "limit": "200"}, seen, is_thorough=is_thorough)
        except GatewayFault as exc:
            if not exc.may_pass:
                raise
            if not is_away:
                typer.echo(printable(f"{exc} Calls go on here once it answers."), err=True)
            calls, is_away, steady = [], True, now + timedelta(seconds=LOOK_BACK)
            continue
        is_away = False
        looked = max(looked, now) if now >= steady else looked
        calls = found if looks else [call for call in found if call["request_id"] > newest]  # the rest is older
        looks += 1
        if is_thorough and "from" not in said:
            least = str(least_id(looked.timestamp() - 2 * LOOK_BACK))
            seen.difference_update([each for each in seen if each < least])


def as_line(call: Mapping[str, Any], format: Format) -> str:
    """Return a call as a line of its own: all of it as JSON, else the columns."""
    if format is Format.JSON:
        return msgspec.json.Encoder(decimal_format="number").encode(call).decode()
    return in_line([text_of(call.get(name)) for name in COLUMNS], format)


def in_line(cells: Sequence[str], format: Format) -> str:
    """Return cells as a line of CSV, or with tabs."""
    if format is Format.TABLE:
        return "\t".join(map(printable, cells))
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(map(as_text, cells))
    return line.getvalue()


def new_calls(
    page_of: Callable[[Mapping[str, str]], Any], said: Mapping[str, str], seen: set[str], *, is_thorough: bool = False
) -> list[dict[str, Any]]:
    """Return the calls of all pages that are not in ``seen``, newest first, and note them there.

    Up to the first page without one, or ``is_thorough``.
    """
    found: list[dict[str, Any]] = []
    after: dict[str, str] = {}
    while True:
        page = page_of({**said, **after})
        new = [call for call in page["data"] if call["request_id"] not in seen]
        found += new
        if page["next"] is None or not (new or is_thorough):
            seen.update(call["request_id"] for call in found)  # only now: a fault on the way loses none
            return found
        after = {"after": page["next"]}


def _page(settings: Settings, said: Mapping[str, str], team: str | None) -> Any:
    """Return a page from this deployment's own database."""
    try:
        wanted: CallFilter = read_filter(said, Clock().moment(), team)
    except BadRequest as exc:
        raise typer.BadParameter(exc.message) from exc

    async def calls(connection: AsyncConnection) -> Any:
        await check_team(connection, team)
        return await list_calls(connection, wanted)

    return attempt(settings, calls)


def _remote_page(gateway: RemoteGateway, said: Mapping[str, str], team: str | None) -> Any:
    """Return a page over HTTP: of all teams with an admin key, else of the key's own."""
    if gateway.address.admin_key is None:
        if team is not None and team != (own := gateway.get("/v1/team")["id"]):
            raise GatewayFault(f"a team's key sees its own team alone, {own}: leave --team out, or use an admin key")
        return gateway.get("/v1/calls", **said)
    return gateway.get("/admin/calls", team_id=team, **said)
