# `tollgate login` and `logout`: a gateway and a key, tried and kept in a file that its owner alone can read.

from __future__ import annotations

import sys
from typing import Annotated

import typer
from msgspec.structs import replace

from gateway.terminal.address import LOOPBACK, Address, keep_login, login_file, read_key, read_login, read_url
from gateway.terminal.printing import fail, say
from gateway.terminal.remote_gateway import GatewayFault, RemoteGateway


def login(
    url: Annotated[str | None, typer.Option("--url", help="The gateway's; asked for if not given")] = None,
    key: Annotated[
        str | None, typer.Option("--key", "--api-key", help="Better not given: asked for unseen, or read from a pipe")
    ] = None,
) -> None:
    """Keep a gateway and a key for the commands that ask over HTTP. The key is tried first, and never shown.

    A team's key and an admin key of the same gateway may both be kept: log in with one, then with the other.
    """
    known = read_login()
    if url is None:
        if not sys.stdin.isatty():
            fail("from a pipe, `tollgate login` reads the key alone: give the URL with --url", 2)
        url = typer.prompt("URL of the gateway", default=None if known is None else known.url)
    place = read_url(url or "")
    if key is None:
        key = typer.prompt("Key (not shown)", hide_input=True) if sys.stdin.isatty() else sys.stdin.readline()
    alone = Address(url=place, source="the command line").with_key(read_key(key))
    if place.startswith("http://") and place.split("/")[2].rpartition(":")[0].strip("[]") not in LOOPBACK:
        sys.stderr.write(f"{place} is not https: the key and every prompt can be read on the way\n")
    whose = _try(alone)
    kept = (
        alone
        if known is None or known.url != place
        else replace(known, team_key=alone.team_key or known.team_key, admin_key=alone.admin_key or known.admin_key)
    )
    say(f"{place}: {whose}, kept in {keep_login(kept)}")


def logout() -> None:
    """Forget what `tollgate login` has kept on this machine; the key itself goes on working until it is revoked."""
    path = login_file()
    try:
        path.unlink()
    except FileNotFoundError:
        fail("nothing was kept: you are not logged in")
    say(f"{path} is gone; `tollgate keys revoke KEY_ID` ends a key")


def _try(address: Address) -> str:
    """Return whose key it is, as its gateway says. Ends the command where it is none."""
    gateway = RemoteGateway(address)
    try:
        if address.team_key is not None:
            team = gateway.get("/v1/team")
            return f"key {team['key']['key_id']} of the team {team['id']}"
        gateway.get("/admin/me")  # for every role
        return "an admin key"
    except GatewayFault as exc:
        fail(str(exc), exc.status)
    except (KeyError, TypeError):
        fail(f"{address.url} answers, but not as a Tollgate gateway: is it the right URL, without a path?", 4)
