# `tollgate owners`: the processes that hold leases on budgets, and the end of one whose journal is lost.

from __future__ import annotations

from typing import Annotated, Any

import typer
from msgspec.structs import asdict
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.upkeep.owner_list import RETIRED_AFTER, ListedOwner, list_owners, retire_owner
from gateway.accounts.serializers import dollars, moment
from gateway.commands.command_line import cli_actor, read_settings, run
from gateway.storage.audit_log import record_act
from gateway.terminal.config_path import ConfigOption
from gateway.terminal.printing import Format, FormatOption, fail, say, show

command = typer.Typer(help="Gateways and workers: what each holds of budgets, and retiring one that is lost.")

COLUMNS = ("id", "state", "version", "started_at", "seen_at", "backlog", "scopes", "unused_tokens", "unused_usd")

OwnerId = Annotated[str, typer.Argument(metavar="ID", help="The owner's id, as listed")]


@command.callback(invoke_without_command=True)
def list_without_a_word(context: typer.Context, config: ConfigOption = None) -> None:
    """List the owners, where no command is named."""
    if context.invoked_subcommand is None:
        list_all_owners(config=config)


@command.command("list")
def list_all_owners(
    ended: Annotated[bool, typer.Option("--ended", help="Also those that have ended")] = False,
    config: ConfigOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """List the processes, seen last first, with what each holds unused of this month's budgets."""
    found = run(read_settings(config), lambda connection: list_owners(connection, with_ended=ended))
    rows = [_view(owner) for owner in found]
    show(format, {"object": "list", "data": rows}, COLUMNS, rows, "Owners")


@command.command("retire")
def retire_one_owner(
    owner: OwnerId, yes: Annotated[bool, typer.Option("--yes", help="Do not ask")] = False, config: ConfigOption = None
) -> None:
    """End an owner whose journal is lost: the room that it holds goes back to its teams.

    What it has spent and not carried to the ledger is then never billed, unless its journal is found after all.
    """
    settings = read_settings(config)
    if not yes and not typer.confirm(f"Is the journal of {owner} lost, and its process dead?"):
        fail("nothing was done")
    said, words = run(settings, lambda connection: _retire(connection, owner))
    match said:
        case "retired":
            say(f"{owner} has ended: {words}")
        case "alive":
            fail(f"{owner} was seen in the last {RETIRED_AFTER:.0f} s: stop its process first")
        case "ended":
            fail(f"{owner} has ended already")
        case _:
            fail(f"no owner {owner}: see `tollgate owners list`")


async def _retire(connection: AsyncConnection, owner: str) -> tuple[str, str]:
    """Return what became of an owner, and what went back."""
    held = next((one for one in await list_owners(connection) if one.id == owner), None)
    said = await retire_owner(connection, owner)
    if said != "retired" or held is None:
        return said, ""
    details = {name: _view(held)[name] for name in ("seen_at", "backlog", "unused_tokens", "unused_usd")}
    await record_act(connection, cli_actor(), "owner.retired", subject=owner, details=details)
    words = f"${dollars(held.unused_nanousd)} and {held.unused_tokens} tokens went back to {held.scopes} teams and keys"
    return said, words


def _view(owner: ListedOwner) -> dict[str, Any]:
    view = asdict(owner)
    for name in ("started_at", "seen_at", "ended_at", "watermark"):
        view[name] = moment(view[name])
    return view | {"object": "owner", "unused_usd": dollars(owner.unused_nanousd)}
