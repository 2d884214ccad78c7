# `tollgate teams`: which teams may call, which models, how much. The use cases behind /admin, on Postgres directly, so
# that they also work while no gateway runs.

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated

import typer
from msgspec import UNSET

from gateway.accounts.schemas import (
    LimitsInput,
    NewTeam,
    SafetyInput,
    TeamPatch,
    Webhooked,
    check_safety,
    with_checked_webhook,
)
from gateway.accounts.serializers import team_view
from gateway.accounts.teams import TeamRecord, create_team, get_team, list_teams, update_team
from gateway.commands.command_line import Count, Models, Usd, cli_actor, read_limits, read_names, read_settings, run
from gateway.config.paths import ConfigOption
from gateway.core.settings import Level, Settings
from gateway.terminal.printing import Format, FormatOption, fail, show
from protocol.errors import ServiceError

command = typer.Typer(no_args_is_help=True, help="Teams: who may call, which models, how much.")

LEVELS: Mapping[str, Level | None] = {"block": "block", "flag": "flag", "off": "off", "none": None}
COLUMNS = ("id", "name", "weight", "allowed_models", "suspended", "limits", "created_at")

TeamId = Annotated[str, typer.Argument(metavar="ID", help="The team's id")]
Name = Annotated[str | None, typer.Option(help="For people")]
Weight = Annotated[float | None, typer.Option(help="Its share where teams compete")]
Smaller = Annotated[bool | None, typer.Option("--allow-smaller/--no-smaller", help="Smaller models under overload")]
Webhook = Annotated[str | None, typer.Option(metavar="URL", help="Where its events go, or none")]
LevelOption = Annotated[
    str | None,
    typer.Option(metavar="block|flag|off|none", help="Stricter than the deployment; none: as it has it"),
]
Levels = Annotated[
    list[str] | None,
    typer.Option("--safety-level", metavar="NAME=LEVEL", help="Of a group or category"),
]


@command.command("create")
def create(
    team_id: TeamId,
    name: Name = None,
    weight: Weight = None,
    models: Models = None,
    allow_smaller: Smaller = None,
    safety_input: LevelOption = None,
    safety_output: LevelOption = None,
    safety_level: Levels = None,
    webhook_url: Webhook = None,
    requests_per_minute: Count = None,
    tokens_per_minute: Count = None,
    concurrent_requests: Count = None,
    tokens_per_day: Count = None,
    usd_per_day: Usd = None,
    usd_per_month: Usd = None,
    config: ConfigOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Create a team."""
    allowed = read_names(models)
    new = NewTeam(
        id=team_id,
        name=name,
        weight=1.0 if weight is None else weight,
        allowed_models=None if allowed is UNSET else allowed,
        allow_smaller=allow_smaller is not False,
        safety=_safety(safety_input, safety_output, safety_level),
        limits=read_limits(locals()),
        webhook_url=None if webhook_url == "none" else webhook_url,
    )
    settings = read_settings(config)
    new = _checked(new, settings)
    models_known = settings.catalog().names()
    record = run(settings, lambda connection: create_team(connection, new, cli_actor(), models_known))
    _show_teams([record], format, f"Team {team_id} is made; next: tollgate keys create --team {team_id}")


@command.command("set")
def change(
    team_id: TeamId,
    name: Name = None,
    weight: Weight = None,
    models: Models = None,
    allow_smaller: Smaller = None,
    safety_input: LevelOption = None,
    safety_output: LevelOption = None,
    safety_level: Levels = None,
    webhook_url: Webhook = None,
    requests_per_minute: Count = None,
    tokens_per_minute: Count = None,
    concurrent_requests: Count = None,
    tokens_per_day: Count = None,
    usd_per_day: Usd = None,
    usd_per_month: Usd = None,
    suspended: Annotated[bool | None, typer.Option("--suspend/--resume", help="Shut it out, or let it in")] = None,
    config: ConfigOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Change what is named and leave the rest; a limit of `none` goes."""
    patch = TeamPatch(
        name=UNSET if name is None else name,
        weight=UNSET if weight is None else weight,
        allowed_models=read_names(models),
        allow_smaller=UNSET if allow_smaller is None else allow_smaller,
        safety=_safety(safety_input, safety_output, safety_level) or UNSET,
        limits=read_limits(locals()),
        webhook_url=UNSET if webhook_url is None else None if webhook_url == "none" else webhook_url,
        suspended=UNSET if suspended is None else suspended,
    )
    if patch == TeamPatch(limits=LimitsInput()):
        fail("nothing to change; see tollgate teams set --help")
    settings = read_settings(config)
    patch = _checked(patch, settings)
    models_known = settings.catalog().names()
    record = run(settings, lambda connection: update_team(connection, team_id, patch, cli_actor(), models_known))
    _show_teams([record], format, f"Team {team_id}")


@command.command("list")
def list_all(config: ConfigOption = None, format: FormatOption = Format.TABLE) -> None:
    """List the teams."""
    records = run(read_settings(config), lambda connection: list_teams(connection, limit=100_000))
    _show_teams(records, format, "Teams", as_list=True)


@command.command("show")
def show_one(team_id: TeamId, config: ConfigOption = None, format: FormatOption = Format.TABLE) -> None:
    """Show a team."""
    record = run(read_settings(config), lambda connection: get_team(connection, team_id))
    _show_teams([record], format, f"Team {team_id}")


def _show_teams(records: list[TeamRecord], format: Format, title: str, as_list: bool = False) -> None:
    rows = [team_view(record) for record in records]
    whole: object = {"object": "list", "data": rows, "has_more": False} if as_list else rows[0]
    show(format, whole, COLUMNS, rows, title)


def _checked(wanted: Webhooked, settings: Settings) -> Webhooked:
    """Return ``wanted`` if the deployment allows its policy and its webhook, or print why not and exit 1."""
    try:
        check_safety(wanted.safety, settings.safety)
        return asyncio.run(with_checked_webhook(wanted, settings.callbacks_allow))
    except ServiceError as exc:
        fail(exc.message)


def _safety(input: str | None, output: str | None, levels: list[str] | None) -> SafetyInput | None:
    if input is None and output is None and not levels:
        return None
    named = dict(said.rpartition("=")[::2] for said in levels or ())
    return SafetyInput(
        input=UNSET if input is None else _level("--safety-input", input),
        output=UNSET if output is None else _level("--safety-output", output),
        levels={name: _level("--safety-level", said) for name, said in named.items()} if named else UNSET,
    )


def _level(option: str, said: str) -> Level | None:
    if said not in LEVELS:
        fail(f"{option} takes block, flag, off or none, not {said!r}")
    return LEVELS[said]
