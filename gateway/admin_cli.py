# The commands for admins, as `tollgate` shows them: teams, keys, usage, config.

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from gateway.batch_cli import batch_app
from gateway.command_line import fail, say
from gateway.config.file import ConfigFaults, load_settings
from gateway.keys_cli import keys_app
from gateway.teams_cli import teams_app
from gateway.usage_cli import usage_command

__all__ = ["batch_app", "config_app", "keys_app", "teams_app", "usage_command"]

config_app = typer.Typer(no_args_is_help=True, help="The configuration file.")


@config_app.command("check")
def check(file: Annotated[Path, typer.Argument(help="tollgate.yaml")]) -> None:
    """Say everything that is wrong with a configuration file, with lines, and exit 1; or that nothing is."""
    try:
        settings = load_settings(file, os.environ)
    except ConfigFaults as exc:
        fail(str(exc))
    say(f"{file}: fine: {len(settings.models)} models at {len(settings.providers)} providers")
