# `tollgate teams`: which teams may call, which models, how much. Over HTTP with an admin key, or, where a deployment is
# at hand, by the use cases behind /admin on its Postgres: they also work while no gateway runs.

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, get_args

import typer
from msgspec import UNSET
from msgspec.structs import replace

from gateway.accounts.schemas import (
    LimitsInput,
    ModelLimitsInput,
    NewTeam,
    SafetyInput,
    TeamPatch,
    Webhooked,
    check_safety,
    with_checked_webhook,
)
from gateway.accounts.serializers import list_view, team_view
from gateway.accounts.teams import create_team, get_team, list_teams, update_team
from gateway.commands.command_line import (
    ALL,
    Count,
    Models,
    Usd,
    View,
    carry_out,
    cli_actor,
    read_limit,
    read_limits,
    read_names,
    run,
)
from gateway.core.principals import WithoutUser
from gateway.core.settings import Level, Settings
from gateway.terminal.address import ApiKeyOption, UrlOption
from gateway.terminal.config_path import ConfigOption
from gateway.terminal.printing import Format, FormatOption, fail, show
from protocol.errors import ServiceError

command = typer.Typer(no_args_is_help=True, help="Teams: who may call, which models, how much.")

LEVELS: Mapping[str, Level | None] = {"block": "block", "flag": "flag", "off": "off", "none": None}
LIMITS_OF_MODELS = ModelLimitsInput.__struct_fields__
COLUMNS = (
    "id", "name", "weight", "allowed_models", "suspended", "limits", "model_limits", "user_limits", "tag_limits",
    "cost_centre", "created_at",
)  # fmt: skip

TeamId = Annotated[str, typer.Argument(metavar="ID", help="The team's id")]
Name = Annotated[str | None, typer.Option(help="For people")]
Weight = Annotated[float | None, typer.Option(help="Its share where teams compete")]
Smaller = Annotated[bool | None, typer.Option("--allow-smaller/--no-smaller", help="Smaller models under overload")]
Webhook = Annotated[str | None, typer.Option(metavar="URL", help="Where its events go, or none")]
CostCentre = Annotated[str | None, typer.Option(metavar="NAME", help="To which its cost goes, or none")]
LevelOption = Annotated[
    str | None,
    typer.Option(metavar="block|flag|off|none", help="Stricter than the deployment; none: as it has it"),
]
Levels = Annotated[
    list[str] | None,
    typer.Option("--safety-level", metavar="NAME=LEVEL", help="Of a group or category"),
]

ModelLimits = Annotated[
    list[str] | None,
    typer.Option(metavar="MODEL:LIMIT=N", help="Of its calls to one model, such as gpt-4o:usd_per_day=5, or =none"),
]
UserLimits = Annotated[
    list[str] | None,
    typer.Option(
        metavar="USER:LIMIT=N", help="Of one end user, or of each other one: '*:usd_per_day=2'; USER=default: as those"
    ),
]
TagLimits = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE:LIMIT=N", help="Of calls with this metadata: 'agent=research:usd_per_month=50'"),
]
WithoutUserOption = Annotated[
    str | None, typer.Option(metavar="refuse|count", help="Calls without an end user, where each has limits")
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
    cost_centre: CostCentre = None,
    requests_per_minute: Count = None,
    tokens_per_minute: Count = None,
    concurrent_requests: Count = None,
    tokens_per_day: Count = None,
    usd_per_day: Usd = None,
    usd_per_month: Usd = None,
    model_limit: ModelLimits = None,
    user_limit: UserLimits = None,
    tag_limit: TagLimits = None,
    without_user: WithoutUserOption = None,
    config: ConfigOption = None,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
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
        model_limits=_named_limits("--model-limit MODEL", model_limit),
        user_limits=_named_limits("--user-limit USER", user_limit),
        tag_limits=_named_limits("--tag-limit KEY=VALUE", tag_limit),
        calls_without_user=_without_user(without_user) or "refuse",
        webhook_url=None if webhook_url == "none" else webhook_url,
        cost_centre=None if cost_centre == "none" else cost_centre,
    )

    def here(settings: Settings) -> View:
        checked, catalog = _checked(new, settings), settings.catalog()
        names = catalog.names(), catalog.models
        return team_view(run(settings, lambda connection: create_team(connection, checked, cli_actor(), *names)))

    made = carry_out(config, url, api_key, lambda gateway: gateway.post("/admin/teams", new), here)
    _show_team(made, format, f"Team {team_id} is made; next: tollgate keys create --team {team_id}")


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
    cost_centre: CostCentre = None,
    requests_per_minute: Count = None,
    tokens_per_minute: Count = None,
    concurrent_requests: Count = None,
    tokens_per_day: Count = None,
    usd_per_day: Usd = None,
    usd_per_month: Usd = None,
    model_limit: ModelLimits = None,
    user_limit: UserLimits = None,
    tag_limit: TagLimits = None,
    without_user: WithoutUserOption = None,
    suspended: Annotated[bool | None, typer.Option("--suspend/--resume", help="Shut it out, or let it in")] = None,
    config: ConfigOption = None,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
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
        model_limits=_named_limits("--model-limit MODEL", model_limit) or UNSET,
        user_limits=_named_limits("--user-limit USER", user_limit) or UNSET,
        tag_limits=_named_limits("--tag-limit KEY=VALUE", tag_limit) or UNSET,
        calls_without_user=_without_user(without_user) or UNSET,
        webhook_url=UNSET if webhook_url is None else None if webhook_url == "none" else webhook_url,
        cost_centre=UNSET if cost_centre is None else None if cost_centre == "none" else cost_centre,
        suspended=UNSET if suspended is None else suspended,
    )
    if patch == TeamPatch(limits=LimitsInput()):
        fail("nothing to change; see tollgate teams set --help")

    def here(settings: Settings) -> View:
        checked, catalog = _checked(patch, settings), settings.catalog()
        names = catalog.names(), catalog.models
        return team_view(
            run(settings, lambda connection: update_team(connection, team_id, checked, cli_actor(), *names))
        )

    changed = carry_out(config, url, api_key, lambda gateway: gateway.patch(f"/admin/teams/{team_id}", patch), here)
    _show_team(changed, format, f"Team {team_id}")


@command.command("list")
def list_all(
    config: ConfigOption = None,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """List the teams."""

    def here(settings: Settings) -> View:
        records = run(settings, lambda connection: list_teams(connection, limit=ALL))
        return list_view([team_view(record) for record in records], ALL)

    page = carry_out(config, url, api_key, lambda gateway: gateway.pages("/admin/teams"), here)
    show(format, page, COLUMNS, page["data"], "Teams")


@command.command("show")
def show_one(
    team_id: TeamId,
    config: ConfigOption = None,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Show a team."""
    team = carry_out(
        config,
        url,
        api_key,
        lambda gateway: gateway.get(f"/admin/teams/{team_id}"),
        lambda settings: team_view(run(settings, lambda connection: get_team(connection, team_id))),
    )
    _show_team(team, format, f"Team {team_id}")


def _show_team(team: View, format: Format, title: str) -> None:
    show(format, team, COLUMNS, [team], title)


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


def _named_limits(meant: str, said: list[str] | None) -> dict[str, ModelLimitsInput | None]:
    """Return the limits that options say for one name each, such as ``gpt-4o:usd_per_day=5``; of ``NAME=default`` those
    of its own go. ``meant``: the option, and what it takes."""
    option, _, name = meant.partition(" ")
    found: dict[str, ModelLimitsInput | None] = {}
    for words in said or ():
        which, _, amount = words.rpartition("=")
        if amount == "default" and name != "MODEL":
            found[which] = None
            continue
        of, _, limit = which.rpartition(":")  # a name may hold colons
        if not of or limit not in LIMITS_OF_MODELS:
            fail(f"{option}: expected {name}:LIMIT=N, LIMIT one of {', '.join(LIMITS_OF_MODELS)}; found {words!r}")
        amounts = {limit: read_limit(f"{option} {which}", limit, amount)}
        found[of] = replace(found.get(of) or ModelLimitsInput(), **amounts)
    return found


def _without_user(said: str | None) -> WithoutUser | None:
    for known in get_args(WithoutUser):
        if said == known:
            return known
    return None if said is None else fail(f"--without-user takes refuse or count, not {said!r}")


def _level(option: str, said: str) -> Level | None:
    if said not in LEVELS:
        fail(f"{option} takes block, flag, off or none, not {said!r}")
    return LEVELS[said]
