# `tollgate journal FILE…`: what is in journal files, quarantined or kept, so that an operator can decide about them.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import typer

from billing.journal.adoption import calls_in


def print_calls(files: Sequence[Path]) -> int:
    """Print the usage record of every call in ``files``, a line of JSON each; return 1 where a file shows none."""
    silent = 0
    for file in files:
        try:
            calls = list(calls_in(file))
        except (OSError, msgspec.DecodeError) as exc:
            typer.echo(f"{file}: cannot be read: {exc}", err=True)
            silent += 1
            continue
        for record in calls:
            typer.echo(msgspec.json.encode(record))
        if not calls:
            typer.echo(f"{file}: no call can be read. A journal file is read only under its own name.", err=True)
            silent += 1
    return int(silent > 0)
