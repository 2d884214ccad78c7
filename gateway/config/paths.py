# Which house a command means.

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

CONFIG_VARIABLE = "TOLLGATE_CONFIG"
LOCAL_CONFIG = Path(".tollgate/tollgate.yaml")  # of `tollgate dev` in this folder


def find_config(given: Path | None, env: Mapping[str, str] = os.environ) -> Path:
    """Return ``--config``, else ``$TOLLGATE_CONFIG``, else what the house in ``.tollgate`` runs with."""
    if given is not None:
        return given
    return Path(env.get(CONFIG_VARIABLE) or LOCAL_CONFIG)
