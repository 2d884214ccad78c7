# `tollgate fleet`: the replicas of all pools as a gateway knows them, how many there should be, and the controller that
# starts and stops them.

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.terminal.address import KeyOption, UrlOption
from gateway.terminal.config_path import ConfigOption, find_config
from gateway.terminal.printing import Format, FormatOption, fail, say, show
from gateway.terminal.remote_gateway import remote_gateway

if TYPE_CHECKING:
    from gateway.core.settings import Settings
    from gateway.placing.placer import Placer

command = typer.Typer(no_args_is_help=True, help="Replicas of our own engine that come and go.")

COLUMNS = (
    *("pool", "base_url", "state", "takes_calls", "model", "version", "heartbeat_at", "running", "queue_depth"),
    *("revision", "share", "instance_id", "reason"),
)
ROLLOUT_COLUMNS = ("pool", "state", "revision", "kept", "share", "since", "reason")
TARGET_COLUMNS = (
    *("pool", "target", "ready", "min", "max", "calls_per_second", "predicted_ttft_seconds", "changed_at"),
    *("decided_at", "reason", "rolled_back"),
)


class PlacerName(StrEnum):
    """Where replicas are started."""

    LOCAL = "local"  # processes of this machine
    RAY = "ray"  # machines of a Ray cluster: pip install 'tollgate[ray]'


@command.callback()
def group() -> None:
    """Replicas of our own engine that come and go."""


@command.command("status")
def show_status(url: UrlOption = None, key: KeyOption = None, format: FormatOption = Format.TABLE) -> None:
    """List the replicas of every pool: state, version, last heartbeat, whether calls go there; and what rollouts are
    at. Needs an admin key."""
    with remote_gateway(url, key) as gateway:
        page = gateway.get("/admin/instances")
    rows = [
        one
        | {
            "pool": one["pool"] or one["provider"],
            "model": one["model_id"],
            "heartbeat_at": one["heartbeat_at"] or ("by address" if one["state"] != "lost" else None),
            "takes_calls": "yes" if one["takes_calls"] else "no",
        }
        for one in page["instances"]
    ]
    rows.sort(key=lambda row: (row["pool"], row["base_url"]))
    show(format, page, COLUMNS, rows, "Fleet, as the gateway that answered knows it")
    if page["rollouts"] and format is Format.TABLE:
        show(format, page, ROLLOUT_COLUMNS, page["rollouts"], "Rollouts: another version, and which share it has")


@command.command("targets")
def show_targets(url: UrlOption = None, key: KeyOption = None, format: FormatOption = Format.TABLE) -> None:
    """Show how many replicas each pool should have, and why. Needs an admin key."""
    with remote_gateway(url, key) as gateway:
        page = gateway.get("/admin/fleet/targets")
    show(format, page, TARGET_COLUMNS, page["targets"], "Targets of pools with scaling")


@command.command("scale")
def scale(
    pool: Annotated[str, typer.Argument(metavar="POOL", help="As `tollgate fleet targets` lists it")],
    target: Annotated[str, typer.Argument(metavar="N", help="Replicas, within min and max; or auto")],
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Set how many replicas a pool should have; `auto`: as many as its calls need. Needs an admin key."""
    if target != "auto" and not target.isdecimal():
        fail(f"{target!r} is no number of replicas: give a whole number, or auto", 2)
    with remote_gateway(url, key) as gateway:
        body = {"target": None if target == "auto" else int(target)}
        found = gateway.post(f"/admin/fleet/targets/{pool}", body)
    say(f"{pool}: {found['target']} replicas, {found['reason']}")


@command.command("up")
def run_controller(
    config: ConfigOption = None,
    placer: Annotated[PlacerName, typer.Option(help="Where replicas are started")] = PlacerName.LOCAL,
) -> None:
    """Start and stop replicas of pools with `engine`, as many as their targets say; one controller at a time acts.

    SIGTERM drains and ends all replicas, SIGUSR1 ends the controller alone; SIGHUP has the file read again.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # which would kill until a handler is there
    path = find_config(config)
    from gateway.config.file import ConfigFaults, load_settings
    from gateway.placing import controller

    try:
        settings = load_settings(path, os.environ)
    except ConfigFaults as exc:
        fail(str(exc))
    if settings.fleet is None or not any(pool.engine for pool in settings.fleet.pools.values()):
        fail(f"{path}: no pool has an engine: fleet: {{pools: {{NAME: {{scaling: …, engine: {{model: …}}}}}}}}")
    raise typer.Exit(controller.run_controller(path, settings, _opener(placer, settings)))


def _opener(placer: PlacerName, settings: Settings) -> Callable[[], Placer]:
    """Return what opens the placer, once it is this controller's turn."""
    if placer is PlacerName.LOCAL:
        from gateway.placing.local import LocalPlacer

        return lambda: LocalPlacer(settings.data_dir / "fleet")
    try:
        from gateway.placing.on_ray import RayPlacer
    except ImportError:
        fail("Ray is not installed: pip install 'tollgate[ray]'")
    return lambda: RayPlacer(fleet=fleet_of(settings.redis_url))


def fleet_of(redis_url: str) -> str:
    """Return what tells the Redis of a URL from others, however that is written: neither its password nor its TLS."""
    from redis.asyncio.connection import parse_url

    from protocol.serving.redis_url import read_servers

    several = read_servers(redis_url)
    told = parse_url(several.url if several else redis_url)
    one = told.get("path") or f"{told.get('host', 'localhost')}:{told.get('port', 6379)}"
    where = ",".join(sorted(f"{host}:{port}" for host, port in several.addresses)) if several else one
    return f"{where}/{several.service or '' if several else ''}/{told.get('db', 0)}"
