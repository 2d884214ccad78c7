# `tollgate fleet`: the replicas of every pool as a gateway knows them, and how many there should be.

from __future__ import annotations

import typer

from gateway.terminal.address import KeyOption, UrlOption
from gateway.terminal.printing import Format, FormatOption, show
from gateway.terminal.remote_gateway import remote_gateway

command = typer.Typer(no_args_is_help=True, help="Replicas of our own engine that come and go.")

COLUMNS = (
    *("pool", "base_url", "state", "takes_calls", "model", "version", "heartbeat_at", "running", "queue_depth"),
    *("instance_id", "reason"),
)
TARGET_COLUMNS = (
    *("pool", "target", "ready", "min", "max", "calls_per_second", "predicted_ttft_seconds", "changed_at"),
    *("decided_at", "reason"),
)


@command.callback()
def group() -> None:
    """Replicas of our own engine that come and go."""


@command.command("status")
def show_status(url: UrlOption = None, key: KeyOption = None, format: FormatOption = Format.TABLE) -> None:
    """List the replicas of every pool: state, version, last heartbeat, whether calls go there. Needs an admin key."""
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


@command.command("targets")
def show_targets(url: UrlOption = None, key: KeyOption = None, format: FormatOption = Format.TABLE) -> None:
    """Show how many replicas each pool should have, and why. Needs an admin key."""
    with remote_gateway(url, key) as gateway:
        page = gateway.get("/admin/fleet/targets")
    show(format, page, TARGET_COLUMNS, page["targets"], "Targets of pools with scaling")
