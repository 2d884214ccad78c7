# `tollgate provider-keys`: a team's own keys for providers, over HTTP, with an admin key or that of the team's admin. A
# key is asked for unseen, or read from a pipe: never an argument, which all users of a machine see.

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from gateway.terminal.address import KeyOption, UrlOption
from gateway.terminal.printing import Format, FormatOption, say, show
from gateway.terminal.remote_gateway import remote_gateway

COLUMNS = ("id", "provider", "name", "fingerprint", "created_at", "rotated_at")

command = typer.Typer(no_args_is_help=True, help="A team's own keys for providers.")

Team = Annotated[str, typer.Argument(help="The team's id")]
KeyId = Annotated[str, typer.Argument(metavar="ID", help="Of the provider key, as `list` has it")]


@command.command("list")
def list_keys(team: Team, url: UrlOption = None, key: KeyOption = None, format: FormatOption = Format.TABLE) -> None:
    """List a team's keys by their fingerprints, in the order in which they are used."""
    with remote_gateway(url, key) as gateway:
        page = gateway.get(f"/admin/teams/{team}/provider-keys")
    show(format, page, COLUMNS, page["data"], f"Provider keys of {team}")


@command.command("add")
def add(
    team: Team,
    provider: Annotated[str, typer.Argument(help="As tollgate.yaml names it")],
    url: UrlOption = None,
    key: KeyOption = None,
    name: Annotated[str, typer.Option(help="What the list calls it")] = "",
) -> None:
    """Bring a key for a provider. It is asked for unseen, or read from a pipe."""
    said = {"provider": provider, "key": _secret(), "name": name}
    with remote_gateway(url, key) as gateway:
        _tell(gateway.post(f"/admin/teams/{team}/provider-keys", said), "is used from now on")


@command.command("rotate")
def rotate(team: Team, key_id: KeyId, url: UrlOption = None, key: KeyOption = None) -> None:
    """Put another key in the place of one, at once. It is asked for unseen, or read from a pipe."""
    said = {"key": _secret()}
    with remote_gateway(url, key) as gateway:
        _tell(gateway.post(f"/admin/teams/{team}/provider-keys/{key_id}/rotate", said), "is used from now on")


@command.command("revoke")
def revoke(team: Team, key_id: KeyId, url: UrlOption = None, key: KeyOption = None) -> None:
    """Erase a key. Every gateway goes without it within a second."""
    with remote_gateway(url, key) as gateway:
        _tell(gateway.delete(f"/admin/teams/{team}/provider-keys/{key_id}"), "is erased")


def _secret() -> str:
    if sys.stdin.isatty():
        return str(typer.prompt("The provider's key (not shown)", hide_input=True))
    return sys.stdin.readline().strip()


def _tell(made: Any, what: str) -> None:
    say(f"{made['id']} for {made['provider']} ({made['fingerprint']}) {what}")
