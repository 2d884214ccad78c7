# `tollgate models`, `ps`, `breakers`, `limits` and `audit-log`: each asks one thing of a gateway and prints a table.

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
import typer

from gateway.terminal.address import KeyOption, UrlOption
from gateway.terminal.printing import Format, FormatOption, say, show
from gateway.terminal.remote_gateway import PAGE, GatewayFault, RemoteGateway, remote_gateway

MODELS = ("id", "owned_by", "input", "output", "context", "max_output", "abilities")
REPLICAS = (
    *("instance_id", "model_id", "status", "running", "queue_depth", "memory_utilization_pct", "tokens_per_second"),
    *("requests_per_second", "prefix_hit_rate", "gpu_node_id", "seen_at"),
)
BREAKERS = ("id", "model", "provider", "endpoint", "state", "failures", "requests", "reason", "retry_at", "keys")
LIMITS = ("scope", "limit", "value", "used", "held", "left")
AUDITED = ("created_at", "actor", "action", "team_id", "subject", "details", "address", "reason", "request_id")
FOLLOW_EVERY = 2.0  # seconds

Limit = Annotated[int, typer.Option(min=1, max=PAGE, help="How many, the newest")]


def models(url: UrlOption = None, key: KeyOption = None, format: FormatOption = Format.TABLE) -> None:
    """List what this key may ask for: models with prices in USD per million tokens, routes, aliases."""
    with remote_gateway(url, key) as gateway:
        page = gateway.get("/v1/models")
    rows = [
        {**one, **{name: (one.get("price") or {}).get(name) for name in ("input", "output")}} for one in page["data"]
    ]
    rows = [row | ({"owned_by": f"alias of {row['alias_of']}"} if "alias_of" in row else {}) for row in rows]
    show(format, page, MODELS, rows, "Models (USD per million tokens)")


def replicas(url: UrlOption = None, key: KeyOption = None, format: FormatOption = Format.TABLE) -> None:
    """List the replicas of our own engine: what runs, what waits, how full memory is. Needs an admin key."""
    with remote_gateway(url, key) as gateway:
        page = gateway.get("/admin/instances")
    rows = [one | {"status": "gone?" if one["stale"] else one["status"]} for one in page["instances"]]
    show(format, page, REPLICAS, rows, "Engine replicas")


def breakers(
    url: UrlOption = None,
    key: KeyOption = None,
    only_open: Annotated[bool, typer.Option("--open", help="Only what is not called as usual")] = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """List the breaker of every model at every endpoint, and provider keys in cooldown. Needs an admin key."""
    with remote_gateway(url, key) as gateway:
        page = gateway.get("/admin/breakers")
    rows = [one | {"keys": len(one["keys_set_aside"]) or None} for one in page["breakers"]]
    rows = [row for row in rows if not only_open or row["state"] != "closed" or row["keys"]]
    show(format, page, BREAKERS, rows, "Breakers (keys: provider keys in cooldown)")
    if format is Format.TABLE and not page["shared"]:
        say("Redis is away: these are the counts of one gateway alone.")


def limits(
    team: Annotated[str | None, typer.Argument(help="The team's id; default: the team of the key")] = None,
    url: UrlOption = None,
    key: KeyOption = None,
    of: Annotated[
        str | None, typer.Option(metavar="user|metadata:KEY", help="Of its end users or a tag's values; an admin's key")
    ] = None,
    name: Annotated[str | None, typer.Option(help="With --of: of this one alone")] = None,
    after: Annotated[str | None, typer.Option(metavar="ID", help="With --of: those after the last page's last")] = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Show a team's limits, and what is used, held and left of its budgets."""
    with remote_gateway(url, key) as gateway:
        whole = _team(gateway, team)
        if of is not None:
            said = {"of": of, "name": name, "after": after, "limit": PAGE}
            page = gateway.get(
                f"/admin/teams/{whole['id']}/value-budgets", **{k: v for k, v in said.items() if v is not None}
            )
            rows = [
                {"id": one["id"], "name": one["name"], "budget": budget, **parts}
                for one in page["data"]
                for budget, parts in one["budgets"].items()
            ]
            show(format, page, ("id", "name", "budget", "used", "held", "left"), rows, f"{of} of {whole['id']}")
            if format is Format.TABLE and page["has_more"]:
                say(f"There are more: --after {page['data'][-1]['id']}")
            return
    rows = _limits_of(f"team {whole['id']}", whole)
    for name, limits in whole.get("model_limits", {}).items():  # none from a gateway of an earlier version
        budgets = (whole["model_budgets"] or {}).get(name)
        rows += _limits_of(f"team {whole['id']} at {name}", {"limits": limits, "budgets": budgets})
    if "key" in whole:
        rows += _limits_of(f"key {whole['key']['key_id']}", whole["key"])
    rows = [row for row in rows if row["value"] is not None or row.get("used") or row.get("held")]
    if not rows and format is Format.TABLE:
        say(f"{whole['id']} has no limits, and has used nothing of a day or a month.")
    else:
        show(format, whole, LIMITS, rows, f"Limits of {whole['id']} (none where empty; a day and a month are UTC)")
    if format is Format.TABLE and whole.get("deleted_at"):
        say(f"The team was deleted at {whole['deleted_at']}; its books stay.")
    elif format is Format.TABLE and whole.get("suspended"):
        say("The team is suspended: its calls are refused.")


def audit_log(
    url: UrlOption = None,
    key: KeyOption = None,
    team: Annotated[str | None, typer.Option(help="Of this team alone")] = None,
    action: Annotated[str | None, typer.Option(help="Such as key.revoked")] = None,
    limit: Limit = 50,
    format: FormatOption = Format.TABLE,
    ocsf: Annotated[
        int | None, typer.Option(min=0, help="Events of OCSF, a line each: those after this entry's id; 0 for all")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="With --ocsf: go on with those that come")] = False,
) -> None:
    """Show what admins did and what the safety checks found, newest first. Needs an admin key."""
    with remote_gateway(url, key) as gateway:
        if ocsf is not None:
            _stream_events(gateway, ocsf, follow, team_id=team, action=action)
            return
        page = gateway.get("/admin/audit-log", team_id=team, action=action, limit=limit)
    show(format, page, AUDITED, page["data"], "Audit log, newest first (UTC)")


def _stream_events(gateway: RemoteGateway, after: int, follow: bool, **named: str | None) -> None:
    """Print events in their order, each once, until there are no more; or for as long as the command runs."""
    said = {name: value for name, value in named.items() if value is not None}
    while True:
        pieces = gateway.content("/admin/audit-log", format="ocsf", after=after, limit=PAGE, **said)
        page = b"".join(pieces).splitlines()
        for line in page:
            print(line.decode(), flush=True)  # noqa: T201
        if page:
            after = int(msgspec.json.decode(page[-1])["metadata"]["uid"])
        elif not follow:
            return
        else:
            time.sleep(FOLLOW_EVERY)


def _team(gateway: RemoteGateway, team: str | None) -> Any:
    """Return a team with its budgets: of an admin's choice, or the key's own."""
    if gateway.address.admin_key is not None and team is not None:
        return gateway.get(f"/admin/teams/{team}")
    if gateway.address.team_key is None:
        raise GatewayFault("an admin key asks by the team: `tollgate limits TEAM`", 2)
    own = gateway.get("/v1/team")
    if team not in (None, own["id"]):
        return gateway.get(f"/admin/teams/{team}")  # says what it needs
    return own


def _limits_of(scope: str, whole: Any) -> list[dict[str, Any]]:
    """Return a line for each limit; a budget's with its use."""
    periods = {"tokens_per_day": "tokens_today", "usd_per_day": "usd_today", "usd_per_month": "usd_this_month"}
    budgets = whole.get("budgets") or {}
    return [
        {"scope": scope, "limit": name, "value": value, **(budgets.get(periods.get(name)) or {})}
        for name, value in whole["limits"].items()
    ]
