# Which deployment a command means, and the option that says so.

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

CONFIG_VARIABLE = "TOLLGATE_CONFIG"
LOCAL_CONFIG = Path(".tollgate/tollgate.yaml")  # of `tollgate dev` in this folder

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help=f"tollgate.yaml; else ${CONFIG_VARIABLE}, else the stack running from .tollgate"),
]


def find_config(given: Path | None) -> Path:
    """Return ``--config``, else ``$TOLLGATE_CONFIG``, else the configuration of the dev stack in ``.tollgate``."""
    if given is not None:
        return given
    return Path(os.environ.get(CONFIG_VARIABLE) or LOCAL_CONFIG)
