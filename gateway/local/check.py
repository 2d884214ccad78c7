# Checks a --config file of `tollgate dev` together with the settings that lie under it (JSON on standard input), every
# fault with its line. A process of its own: what reads prices and providers is not to stay in the one that watches.

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from gateway.config.file import ConfigFaults, load_settings


def main(path: Path) -> int:
    """Return 0 for a file without fault; else say what is wrong and return 1."""
    try:
        settings = load_settings(path, os.environ, json.load(sys.stdin))
    except ConfigFaults as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    sys.stdout.writelines(f"{path}: {one.line()}\n" for one in settings.left_out)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
