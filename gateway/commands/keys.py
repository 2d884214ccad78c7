# `tollgate keys` and `tollgate admin-keys`: create, list, rotate and revoke keys; over HTTP, or on Postgres directly.

from __future__ import annotations

from typing import Annotated, Any

import typer
from msgspec import UnsetType
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.accounts.admin_keys import create_admin_key, list_admin_keys, revoke_admin_key
from gateway.accounts.schemas import KeyPatch, LimitsInput, NewAdminKey, NewKey, Rotation
from gateway.accounts.serializers import admin_key_view, key_view, list_view, made_view, moment_of
from gateway.accounts.team_keys import KeyRecord, create_key, list_keys, revoke_key, rotate_key, update_key
from gateway.accounts.teams import check_team
from gateway.commands.command_line import (
    ALL,
    LimitOptions,
    Models,
    View,
    carry_out,
    cli_actor,
    read_expiry,
    read_limits,
    read_names,
    run,
)
from gateway.core.clock import Clock
from gateway.core.keys import pepper_name
from gateway.core.principals import Role
from gateway.core.settings import CacheUse, Settings
from gateway.terminal.options import WhereByApiKey, with_options
from gateway.terminal.printing import Format, fail, is_for_people, say, show
from protocol.errors import BadRequest

command = typer.Typer(no_args_is_help=True, help="Keys of teams: create, list, change, rotate, revoke.")

BOUNDS = ("limits", "allowed_models", "allowed_endpoints", "allowed_addresses")
COLUMNS = ("key_id", "team_id", "name", "prefix", "status", "created_at", "expires_at", "last_used_at")

KeyId = Annotated[str, typer.Argument(metavar="KEY_ID", help="The key's id, key_…")]
Endpoints = Annotated[
    str | None, typer.Option(metavar="NAMES", help="Which endpoints it may call: embeddings,mcp/SERVER/TOOL, or all")
]
From = Annotated[
    str | None,
    typer.Option(metavar="RANGES", help="Whence it may call: addresses or ranges with commas between, or all"),
]


class BoundOptions(LimitOptions, frozen=True, kw_only=True):
    """What bounds the calls of a key."""

    models: Models = None
    endpoints: Endpoints = None
    allow_from: From = None


@command.command("create")
@with_options
def create_one_key(
    team: Annotated[str, typer.Option(help="Whose key it is")],
    *,
    name: Annotated[str, typer.Option(help="For people: where it is used")] = "",
    expires: Annotated[str | None, typer.Option(help="A day, a moment, or from now: 2027-01-31, 90d")] = None,
    cache: Annotated[
        CacheUse | None, typer.Option(help="Whether its calls go by the cache; default: as the model they ask for")
    ] = None,
    bounds: BoundOptions,
    where: WhereByApiKey,
) -> None:
    """Create a key and show it, this once."""
    new = NewKey(team_id=team, name=name, expires_at=read_expiry(expires), cache=cache, **_bounds(bounds))

    def here(settings: Settings) -> View:
        _check_endpoints(new.allowed_endpoints)
        pepper, known = settings.key_pepper, settings.catalog().names()
        made = run(settings, lambda connection: create_key(connection, pepper, new, cli_actor(), Clock().now(), known))
        return made_view(made, Clock().moment())

    _show_made(carry_out(where, lambda gateway: gateway.post("/admin/keys", new), here), where.format)


@command.command("set")
@with_options
def change(
    key_id: KeyId,
    *,
    name: Annotated[str | None, typer.Option(help="For people: where it is used")] = None,
    expires: Annotated[str | None, typer.Option(help="A day, a moment, from now, or never")] = None,
    bounds: BoundOptions,
    where: WhereByApiKey,
) -> None:
    """Change what is named and leave the rest, at every gateway within a second; a limit of `none` goes."""
    said: dict[str, Any] = {} if name is None else {"name": name}
    if expires is not None:
        said["expires_at"] = None if expires == "never" else read_expiry(expires)
    patch = KeyPatch(**said, **_bounds(bounds))
    if patch == KeyPatch(limits=LimitsInput()):
        fail("nothing to change; see tollgate keys set --help", 2)

    def here(settings: Settings) -> View:
        _check_endpoints(patch.allowed_endpoints)
        known, now = settings.catalog().names(), Clock().now()
        record = run(settings, lambda connection: update_key(connection, key_id, patch, cli_actor(), now, known))
        return key_view(record, Clock().moment())

    row = carry_out(where, lambda gateway: gateway.patch(f"/admin/keys/{key_id}", patch), here)
    show(where.format, row, (*COLUMNS, *BOUNDS), [row], f"Key {key_id}")


@command.command("list")
@with_options
def list_all_keys(
    *,
    team: Annotated[str | None, typer.Option(help="Only this team's")] = None,
    unused_days: Annotated[
        int | None, typer.Option(min=1, metavar="DAYS", help="Those that work and were not used for as long")
    ] = None,
    where: WhereByApiKey,
) -> None:
    """List keys by their beginnings; a whole key cannot be shown again."""

    def here(settings: Settings) -> View:
        async def keys(connection: AsyncConnection) -> list[KeyRecord]:
            await check_team(connection, team)
            return await list_keys(connection, team_id=team, limit=ALL)

        records = run(settings, keys)
        rows = [key_view(record, Clock().moment()) for record in records]
        if settings.other_key_peppers:  # which keys are still stored under one of those?
            current = pepper_name(settings.key_pepper)
            for row, record in zip(rows, records, strict=True):
                row["pepper"] = "current" if record.pepper == current else "other"
        return list_view(rows, ALL)

    of_team = {} if team is None else {"team_id": team}
    page = carry_out(where, lambda gateway: gateway.pages("/admin/keys", **of_team), here)
    if unused_days is not None:
        before = moment_of(Clock().now() - unused_days * 86400)
        page["data"] = [
            key
            for key in page["data"]
            if key["status"] == "active" and (key["last_used_at"] or key["created_at"]) < before
        ]
    columns = COLUMNS + ("pepper",) * any("pepper" in row for row in page["data"])
    show(where.format, page, columns, page["data"], "Keys")


@command.command("rotate")
@with_options
def rotate(
    key_id: KeyId,
    *,
    overlap: Annotated[str, typer.Option(help="How long the old key still works; 0s: not at all")] = "24h",
    where: WhereByApiKey,
) -> None:
    """Make a key like this one, and end this one after the overlap."""
    rotation = Rotation(overlap=overlap)

    def here(settings: Settings) -> View:
        pepper, now = settings.key_pepper, Clock().now()
        made = run(settings, lambda connection: rotate_key(connection, pepper, key_id, rotation, cli_actor(), now))
        return made_view(made, Clock().moment())

    path = f"/admin/keys/{key_id}/rotate"
    _show_made(carry_out(where, lambda gateway: gateway.post(path, rotation), here), where.format)


@command.command("revoke")
@with_options
def revoke(key_id: KeyId, where: WhereByApiKey) -> None:
    """End a key at once and for ever."""

    def here(settings: Settings) -> View:
        record = run(settings, lambda connection: revoke_key(connection, key_id, cli_actor()))
        return key_view(record, Clock().moment())

    row = carry_out(where, lambda gateway: gateway.delete(f"/admin/keys/{key_id}"), here)
    show(where.format, row, COLUMNS, [row], f"Key {key_id}")
    if (other := row.get("replaced_by")) is not None:  # none from a gateway of an earlier version
        typer.echo(f"{other} was made in its place and is not revoked by this: tollgate keys revoke {other}", err=True)


def _bounds(said: BoundOptions) -> dict[str, Any]:
    """Return what is said of a key's bounds, by its name in the API."""
    names = {"allowed_models": said.models, "allowed_endpoints": said.endpoints, "allowed_addresses": said.allow_from}
    found = {name: read_names(words) for name, words in names.items() if words is not None}
    return {"limits": read_limits(said), **found}


def _check_endpoints(names: list[str] | UnsetType | None) -> None:
    """Print what is wrong with names of endpoints and exit 1."""
    from gateway.dialects.options import check_endpoints  # with every dialect: the other commands do without

    try:
        check_endpoints(names)
    except BadRequest as exc:
        fail(exc.message)


def _show_made(made: View, format: Format) -> None:
    if not is_for_people(format):
        row = made | {"replaces": made["replaces"]["key_id"]} if "replaces" in made else made
        show(format, made, ("key_id", "key", *COLUMNS[1:], *row.keys() & {"replaces"}), [row], "")
        return
    say(f"{made['key_id']}, a key of team {made['team_id']}; it is shown this once:\n\n  {made['key']}\n")
    if made["expires_at"] is not None:
        say(f"It expires at {made['expires_at']}.")
    if "replaces" in made:
        old = made["replaces"]
        say(f"{old['key_id']} {'is revoked' if old['revoked_at'] else 'works until ' + old['expires_at']}.")


admin_command = typer.Typer(no_args_is_help=True, help="Keys of admins, each with a role: create, list, revoke.")

ADMIN_COLUMNS = ("key_id", "role", "team_id", "name", "prefix", "status", "created_at", "expires_at", "last_used_at")


@admin_command.command("create")
@with_options
def create_one_admin_key(
    role: Annotated[Role, typer.Option(help="What it is for")],
    *,
    team: Annotated[str | None, typer.Option(help="Whose admin it is: for the role team-admin")] = None,
    name: Annotated[str, typer.Option(help="For people: who has it")] = "",
    expires: Annotated[str | None, typer.Option(help="A day, a moment, or from now: 2027-01-31, 90d")] = None,
    where: WhereByApiKey,
) -> None:
    """Create an admin key and show it, this once."""
    new = NewAdminKey(role=role, team_id=team, name=name, expires_at=read_expiry(expires))

    def here(settings: Settings) -> View:
        pepper, now = settings.key_pepper, Clock().now()
        key, record = run(settings, lambda connection: create_admin_key(connection, pepper, new, cli_actor(), now))
        return {"key_id": record.key_id, "key": key} | admin_key_view(record, Clock().moment())

    made = carry_out(where, lambda gateway: gateway.post("/admin/admin-keys", new), here)
    if is_for_people(where.format):
        say(f"{made['key_id']}, an admin key of the role {made['role']}; it is shown this once:\n\n  {made['key']}\n")
    else:
        show(where.format, made, ("key_id", "key", *ADMIN_COLUMNS[1:]), [made], "")


@admin_command.command("list")
@with_options
def list_all_admin_keys(where: WhereByApiKey) -> None:
    """List admin keys by their beginnings; those of tollgate.yaml are not among them."""

    def here(settings: Settings) -> View:
        records = run(settings, lambda connection: list_admin_keys(connection, limit=ALL))
        return list_view([admin_key_view(record, Clock().moment()) for record in records], ALL)

    page = carry_out(where, lambda gateway: gateway.pages("/admin/admin-keys"), here)
    show(where.format, page, ADMIN_COLUMNS, page["data"], "Admin keys")


@admin_command.command("revoke")
@with_options
def revoke_one_admin_key(
    key_id: Annotated[str, typer.Argument(metavar="KEY_ID", help="The key's id, adm_…")], where: WhereByApiKey
) -> None:
    """End an admin key at once and for ever."""

    def here(settings: Settings) -> View:
        record = run(settings, lambda connection: revoke_admin_key(connection, key_id, cli_actor()))
        return admin_key_view(record, Clock().moment())

    row = carry_out(where, lambda gateway: gateway.delete(f"/admin/admin-keys/{key_id}"), here)
    show(where.format, row, ADMIN_COLUMNS, [row], f"Admin key {key_id}")
