# `tollgate teams`: which teams may call, which models, how much. Over HTTP with an admin key, or, where a deployment is
# at hand, by the use cases behind /admin on its Postgres: they also work while no gateway runs.

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, get_args

import typer
from msgspec import UNSET, Struct
from msgspec.structs import replace

from gateway.accounts.schemas import (
    LimitsInput,
    ModelLimitsInput,
    NewTeam,
    SafetyInput,
    TeamPatch,
    Webhooked,
    check_contents,
    check_safety,
    with_checked_webhook,
)
from gateway.accounts.serializers import list_view, team_view
from gateway.accounts.team_deletion import delete_team
from gateway.accounts.teams import create_team, find_team, list_teams, update_team
from gateway.commands.command_line import (
    ALL,
    LimitOptions,
    Models,
    View,
    carry_out,
    cli_actor,
    read_limit,
    read_limits,
    read_names,
    run,
)
from gateway.core.principals import TeamContents, WithoutUser
from gateway.core.settings import FindingLevel, Level, Redacts, Settings
from gateway.terminal.options import WhereByApiKey, with_options
from gateway.terminal.printing import Format, fail, show
from protocol.errors import ServiceError, Unshown

command = typer.Typer(no_args_is_help=True, help="Teams: who may call, which models, how much.")

LONGEST_REASON = 500  # characters
LEVELS: Mapping[str, Level | None] = {"block": "block", "flag": "flag", "off": "off", "none": None}
LIMITS_OF_MODELS = ModelLimitsInput.__struct_fields__
COLUMNS = (
    "id", "name", "weight", "allowed_models", "suspended", "limits", "model_limits", "user_limits", "tag_limits",
    "safety", "contents", "cost_centre", "created_at",
)  # fmt: skip

TeamId = Annotated[str, typer.Argument(metavar="ID", help="The team's id")]
LevelOption = Annotated[
    str | None, typer.Option(metavar="block|flag|off|none", help="Stricter than the deployment; none: as it has it")
]


class TeamOptions(Unshown, Struct, frozen=True, kw_only=True):
    """What is said of a team, beside its limits."""

    name: Annotated[str | None, typer.Option(help="For people")] = None
    weight: Annotated[float | None, typer.Option(help="Its share where teams compete")] = None
    models: Models = None
    allow_smaller: Annotated[
        bool | None, typer.Option("--allow-smaller/--no-smaller", help="Smaller models under overload")
    ] = None
    safety_input: LevelOption = None
    safety_output: LevelOption = None
    safety_level: Annotated[
        list[str] | None, typer.Option(metavar="NAME=LEVEL", help="Of a group (also redact) or category")
    ] = None
    safety_redacts: Annotated[
        str | None, typer.Option(metavar="input|output|both|none", help="Where finds are redacted; none: as it has it")
    ] = None
    webhook_url: Annotated[str | None, typer.Option(metavar="URL", help="Where its events go, or none")] = None
    cost_centre: Annotated[str | None, typer.Option(metavar="NAME", help="To which its cost goes, or none")] = None
    contents_days: Annotated[
        str | None, typer.Option(metavar="DAYS", help="How long what its calls ask and get is kept; none erases it")
    ] = None


class NamedLimitOptions(LimitOptions, frozen=True, kw_only=True):
    """Limits of a team, and of some of its calls."""

    model_limit: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL:LIMIT=N", help="Of its calls to one model, such as gpt-4o:usd_per_day=5, or =none"),
    ] = None
    user_limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="USER:LIMIT=N",
            help="Of one end user, or of each other one: '*:usd_per_day=2'; USER=default: as those",
        ),
    ] = None
    tag_limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE:LIMIT=N", help="Of calls with this metadata: 'agent=research:usd_per_month=50'"
        ),
    ] = None
    without_user: Annotated[
        str | None, typer.Option(metavar="refuse|count", help="Calls without an end user, where each has limits")
    ] = None


@command.command("create")
@with_options
def create(team_id: TeamId, team: TeamOptions, limits: NamedLimitOptions, where: WhereByApiKey) -> None:
    """Create a team."""
    new = NewTeam(id=team_id, **_said(team, limits))

    def here(settings: Settings) -> View:
        checked, catalog = _checked(new, settings), settings.catalog()
        names = catalog.names(), catalog.models
        return team_view(run(settings, lambda connection: create_team(connection, checked, cli_actor(), *names)))

    made = carry_out(where, lambda gateway: gateway.post("/admin/teams", new), here)
    _show_team(made, where.format, f"Team {team_id} is made; next: tollgate keys create --team {team_id}")


@command.command("set")
@with_options
def change(
    team_id: TeamId,
    team: TeamOptions,
    limits: NamedLimitOptions,
    *,
    suspended: Annotated[bool | None, typer.Option("--suspend/--resume", help="Shut it out, or let it in")] = None,
    where: WhereByApiKey,
) -> None:
    """Change what is named and leave the rest; a limit of `none` goes."""
    patch = TeamPatch(**_said(team, limits), suspended=UNSET if suspended is None else suspended)
    if patch == TeamPatch(limits=LimitsInput()):
        fail("nothing to change; see tollgate teams set --help", 2)

    def here(settings: Settings) -> View:
        checked, catalog = _checked(patch, settings), settings.catalog()
        names = catalog.names(), catalog.models
        return team_view(
            run(settings, lambda connection: update_team(connection, team_id, checked, cli_actor(), *names))
        )

    changed = carry_out(where, lambda gateway: gateway.patch(f"/admin/teams/{team_id}", patch), here)
    _show_team(changed, where.format, f"Team {team_id}")


@command.command("list")
@with_options
def list_all(where: WhereByApiKey) -> None:
    """List the teams."""

    def here(settings: Settings) -> View:
        records = run(settings, lambda connection: list_teams(connection, limit=ALL))
        return list_view([team_view(record) for record in records], ALL)

    page = carry_out(where, lambda gateway: gateway.pages("/admin/teams"), here)
    show(where.format, page, COLUMNS, page["data"], "Teams")


@command.command("show")
@with_options
def show_one(team_id: TeamId, where: WhereByApiKey) -> None:
    """Show a team."""
    team = carry_out(
        where,
        lambda gateway: gateway.get(f"/admin/teams/{team_id}"),
        lambda settings: team_view(run(settings, lambda connection: find_team(connection, team_id))),
    )
    _show_team(team, where.format, f"Team {team_id}")


@command.command("delete")
@with_options
def delete(
    team_id: TeamId,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without it, say what would end")] = False,
    reason: Annotated[str | None, typer.Option(help="Why, for the audit log")] = None,
    where: WhereByApiKey,
) -> None:
    """Delete a team for ever, with all that it keeps here; its books stay, under its id."""
    if reason is not None and not (reason.isascii() and reason.isprintable() and len(reason) <= LONGEST_REASON):
        fail(f"--reason takes a line of at most {LONGEST_REASON} ASCII characters: it may travel as a header", 2)
    confirm = team_id if yes else None
    said = {"confirm": team_id} if yes else {}
    why = {} if reason is None else {"x-audit-reason": reason}

    def here(settings: Settings) -> View:
        act = replace(cli_actor(), reason=reason)
        return team_view(run(settings, lambda connection: delete_team(connection, team_id, act, confirm)))

    deleted = carry_out(where, lambda gateway: gateway.delete(f"/admin/teams/{team_id}", said, **why), here)
    _show_team(deleted, where.format, f"Team {team_id} is deleted")


def _show_team(team: View, format: Format, title: str) -> None:
    show(format, team, (*COLUMNS, *(["deleted_at"] if team["deleted_at"] is not None else ())), [team], title)


def _said(team: TeamOptions, limits: NamedLimitOptions) -> dict[str, Any]:
    """Return what options say of a team, by its name in the API."""
    given = {
        "name": team.name,
        "weight": team.weight,
        "allow_smaller": team.allow_smaller,
        "safety": _safety(team),
        "model_limits": _named_limits("--model-limit MODEL", limits.model_limit) or None,
        "user_limits": _named_limits("--user-limit USER", limits.user_limit) or None,
        "tag_limits": _named_limits("--tag-limit KEY=VALUE", limits.tag_limit) or None,
        "calls_without_user": _without_user(limits.without_user),
    }
    said: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if team.models is not None:
        said["allowed_models"] = read_names(team.models)
    for name, words in (("webhook_url", team.webhook_url), ("cost_centre", team.cost_centre)):
        if words is not None:
            said[name] = None if words == "none" else words
    if team.contents_days is not None:
        said["contents"] = _contents(team.contents_days)
    return {"limits": read_limits(limits), **said}


def _checked(wanted: Webhooked, settings: Settings) -> Webhooked:
    """Return ``wanted`` if the deployment allows its policy and its webhook, or print why not and exit 1."""
    try:
        check_safety(wanted.safety, settings.safety)
        check_contents(wanted.contents, settings.retention.contents)
        return asyncio.run(with_checked_webhook(wanted, settings.callbacks_allow))
    except ServiceError as exc:
        fail(exc.message)


def _contents(said: str) -> TeamContents | None:
    if said == "none":
        return None
    if not (said.isascii() and said.isdigit()):
        fail(f"--contents-days takes a whole number of days or none, not {said!r}", 2)
    return TeamContents(int(said))


def _safety(team: TeamOptions) -> SafetyInput | None:
    named = dict(said.rpartition("=")[::2] for said in team.safety_level or ())
    wanted = SafetyInput(
        input=UNSET if team.safety_input is None else _level("--safety-input", team.safety_input),
        output=UNSET if team.safety_output is None else _level("--safety-output", team.safety_output),
        levels={name: _finding_level(said) for name, said in named.items()} if named else UNSET,
        redacts=UNSET if team.safety_redacts is None else _redacts(team.safety_redacts),
    )
    return None if wanted == SafetyInput() else wanted


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
            fail(f"{option}: expected {name}:LIMIT=N, LIMIT one of {', '.join(LIMITS_OF_MODELS)}; found {words!r}", 2)
        amounts = {limit: read_limit(f"{option} {which}", limit, amount)}
        found[of] = replace(found.get(of) or ModelLimitsInput(), **amounts)
    return found


def _without_user(said: str | None) -> WithoutUser | None:
    for known in get_args(WithoutUser):
        if said == known:
            return known
    return None if said is None else fail(f"--without-user takes refuse or count, not {said!r}", 2)


def _level(option: str, said: str) -> Level | None:
    if said not in LEVELS:
        fail(f"{option} takes block, flag, off or none, not {said!r}", 2)
    return LEVELS[said]


def _redacts(said: str) -> Redacts | None:
    for known in get_args(Redacts):
        if said == known:
            return known
    return None if said == "none" else fail(f"--safety-redacts takes input, output, both or none, not {said!r}", 2)


def _finding_level(said: str) -> FindingLevel | None:
    return "redact" if said == "redact" else _level("--safety-level", said)
