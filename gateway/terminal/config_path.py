# Which deployment a command means, and the option that says so.

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from gateway.terminal.printing import fail

CONFIG_VARIABLE = "TOLLGATE_CONFIG"
LOCAL_CONFIG = Path(".tollgate/tollgate.yaml")  # of `tollgate dev` in this folder

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help=f"tollgate.yaml; else ${CONFIG_VARIABLE}, else the stack running from .tollgate"),
]


def find_config(given: Path | None) -> Path:
    """Return ``--config``, else ``$TOLLGATE_CONFIG``, else the configuration of the dev stack in ``.tollgate``.

    Where there is none of them, say how to name one and exit 2.
    """
    named = given or os.environ.get(CONFIG_VARIABLE)
    if not named and not LOCAL_CONFIG.exists():
        fail(f"which deployment? Give --config, set ${CONFIG_VARIABLE}, or run `tollgate dev` in this folder", 2)
    return Path(named or LOCAL_CONFIG)
