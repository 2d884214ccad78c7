# `tollgate keys` and `tollgate admin-keys`: create, list, rotate and revoke keys, on Postgres directly.

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
import typer
from msgspec import UNSET

from gateway.accounts.admin_keys import create_admin_key, list_admin_keys, revoke_admin_key
from gateway.accounts.schemas import KeyPatch, LimitsInput, NewAdminKey, NewKey, Rotation
from gateway.accounts.serializers import admin_key_view, key_view, made_view
from gateway.accounts.team_keys import NewlyMade, create_key, list_keys, revoke_key, rotate_key, update_key
from gateway.commands.command_line import (
    Count,
    Models,
    Usd,
    cli_actor,
    read_expiry,
    read_limits,
    read_names,
    read_settings,
    run,
)
from gateway.config.paths import ConfigOption
from gateway.core.clock import Clock
from gateway.core.keys import pepper_name
from gateway.core.principals import Role
from gateway.core.settings import CacheUse
from gateway.terminal.printing import Format, FormatOption, fail, say, show

command = typer.Typer(no_args_is_help=True, help="Keys of teams: create, list, change, rotate, revoke.")


class Cache(StrEnum):
    """Which calls of a key go by the cache."""

    ON = "on"  # for the likeliest answer
    ALL = "all"  # sampled answers and tool calls too
    OFF = "off"


From = Annotated[
    str | None,
    typer.Option(metavar="RANGES", help="Whence it may call: addresses or ranges with commas between, or all"),
]

COLUMNS = ("key_id", "team_id", "name", "prefix", "status", "created_at", "expires_at", "last_used_at")

KeyId = Annotated[str, typer.Argument(metavar="KEY_ID", help="The key's id, key_…")]


@command.command("create")
def create_one_key(
    team: Annotated[str, typer.Option(help="Whose key it is")],
    name: Annotated[str, typer.Option(help="For people: where it is used")] = "",
    expires: Annotated[str | None, typer.Option(help="A day, a moment, or from now: 2027-01-31, 90d")] = None,
    requests_per_minute: Count = None,
    tokens_per_minute: Count = None,
    concurrent_requests: Count = None,
    tokens_per_day: Count = None,
    usd_per_day: Usd = None,
    usd_per_month: Usd = None,
    cache: Annotated[
        Cache | None, typer.Option(help="Whether its calls go by the cache; default: as the model they ask for")
    ] = None,
    models: Models = None,
    allow_from: From = None,
    config: ConfigOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Create a key and show it, this once."""
    limits = read_limits(locals())
    allowed, ranges = read_names(models), read_names(allow_from)
    use = None if cache is None else msgspec.convert(cache.value, CacheUse)
    new = NewKey(
        team_id=team,
        name=name,
        expires_at=read_expiry(expires),
        limits=limits,
        allowed_models=None if allowed is UNSET else allowed,
        allowed_addresses=None if ranges is UNSET else ranges,
        cache=use,
    )
    settings = read_settings(config)
    pepper, known = settings.key_pepper, settings.catalog().names()
    made = run(settings, lambda connection: create_key(connection, pepper, new, cli_actor(), Clock().now(), known))
    _show_made(made, format)


@command.command("set")
def change(
    key_id: KeyId,
    name: Annotated[str | None, typer.Option(help="For people: where it is used")] = None,
    expires: Annotated[str | None, typer.Option(help="A day, a moment, from now, or never")] = None,
    models: Models = None,
    allow_from: From = None,
    requests_per_minute: Count = None,
    tokens_per_minute: Count = None,
    concurrent_requests: Count = None,
    tokens_per_day: Count = None,
    usd_per_day: Usd = None,
    usd_per_month: Usd = None,
    config: ConfigOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Change what is named and leave the rest, at every gateway within a second; a limit of `none` goes."""
    patch = KeyPatch(
        name=UNSET if name is None else name,
        expires_at=UNSET if expires is None else None if expires == "never" else read_expiry(expires),
        limits=read_limits(locals()),
        allowed_models=read_names(models),
        allowed_addresses=read_names(allow_from),
    )
    if patch == KeyPatch(limits=LimitsInput()):
        fail("nothing to change; see tollgate keys set --help")
    settings = read_settings(config)
    known = settings.catalog().names()
    record = run(settings, lambda connection: update_key(connection, key_id, patch, cli_actor(), Clock().now(), known))
    row = key_view(record, Clock().moment())
    show(format, row, (*COLUMNS, "limits", "allowed_models", "allowed_addresses"), [row], f"Key {key_id}")


@command.command("list")
def list_all_keys(
    team: Annotated[str | None, typer.Option(help="Only this team's")] = None,
    config: ConfigOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """List keys by their beginnings; a whole key cannot be shown again."""
    settings = read_settings(config)
    records = run(settings, lambda connection: list_keys(connection, team_id=team, limit=100_000))
    rows = [key_view(record, Clock().moment()) for record in records]
    columns: tuple[str, ...] = COLUMNS
    if settings.other_key_peppers:  # which keys are still stored under one of those?
        current = pepper_name(settings.key_pepper)
        rows = [
            row | {"pepper": "current" if record.pepper == current else "other"}
            for row, record in zip(rows, records, strict=True)
        ]
        columns = (*COLUMNS, "pepper")
    show(format, {"object": "list", "data": rows, "has_more": False}, columns, rows, "Keys")


@command.command("rotate")
def rotate(
    key_id: KeyId,
    overlap: Annotated[str, typer.Option(help="How long the old key still works; 0s: not at all")] = "24h",
    config: ConfigOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Make a key like this one, and end this one after the overlap."""
    settings = read_settings(config)
    rotation = Rotation(overlap=overlap)
    made = run(
        settings,
        lambda connection: rotate_key(connection, settings.key_pepper, key_id, rotation, cli_actor(), Clock().now()),
    )
    _show_made(made, format)


@command.command("revoke")
def revoke(key_id: KeyId, config: ConfigOption = None, format: FormatOption = Format.TABLE) -> None:
    """End a key at once and for ever."""
    record = run(read_settings(config), lambda connection: revoke_key(connection, key_id, cli_actor()))
    row = key_view(record, Clock().moment())
    show(format, row, COLUMNS, [row], f"Key {key_id}")


def _show_made(made: NewlyMade, format: Format) -> None:
    view = made_view(made, Clock().moment())
    if format is not Format.TABLE:
        show(format, view, ("key_id", "key", *COLUMNS[1:]), [view], "")
        return
    say(f"{made.record.key_id}, a key of team {made.record.team_id}; it is shown this once:\n\n  {made.key}\n")
    if made.record.expires_at is not None:
        say(f"It expires at {view['expires_at']}.")
    if made.replaces is not None:
        old = view["replaces"]
        say(f"{old['key_id']} {'is revoked' if old['revoked_at'] else 'works until ' + old['expires_at']}.")


admin_command = typer.Typer(no_args_is_help=True, help="Keys of admins, each with a role: create, list, revoke.")

ADMIN_COLUMNS = ("key_id", "role", "team_id", "name", "prefix", "status", "created_at", "expires_at", "last_used_at")


@admin_command.command("create")
def create_one_admin_key(
    role: Annotated[Role, typer.Option(help="What it is for")],
    team: Annotated[str | None, typer.Option(help="Whose admin it is: for the role team-admin")] = None,
    name: Annotated[str, typer.Option(help="For people: who has it")] = "",
    expires: Annotated[str | None, typer.Option(help="A day, a moment, or from now: 2027-01-31, 90d")] = None,
    config: ConfigOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Create an admin key and show it, this once."""
    new = NewAdminKey(role=role, team_id=team, name=name, expires_at=read_expiry(expires))
    settings = read_settings(config)
    key, record = run(
        settings, lambda connection: create_admin_key(connection, settings.key_pepper, new, cli_actor(), Clock().now())
    )
    view = {"key_id": record.key_id, "key": key} | admin_key_view(record, Clock().moment())
    if format is Format.TABLE:
        say(f"{record.key_id}, an admin key of the role {record.role}; it is shown this once:\n\n  {key}\n")
    else:
        show(format, view, ("key_id", "key", *ADMIN_COLUMNS[1:]), [view], "")


@admin_command.command("list")
def list_all_admin_keys(config: ConfigOption = None, format: FormatOption = Format.TABLE) -> None:
    """List admin keys by their beginnings; those of tollgate.yaml are not among them."""
    records = run(read_settings(config), lambda connection: list_admin_keys(connection, limit=100_000))
    rows = [admin_key_view(record, Clock().moment()) for record in records]
    show(format, {"object": "list", "data": rows, "has_more": False}, ADMIN_COLUMNS, rows, "Admin keys")


@admin_command.command("revoke")
def revoke_one_admin_key(
    key_id: Annotated[str, typer.Argument(metavar="KEY_ID", help="The key's id, adm_…")],
    config: ConfigOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """End an admin key at once and for ever."""
    record = run(read_settings(config), lambda connection: revoke_admin_key(connection, key_id, cli_actor()))
    row = admin_key_view(record, Clock().moment())
    show(format, row, ADMIN_COLUMNS, [row], f"Admin key {key_id}")
