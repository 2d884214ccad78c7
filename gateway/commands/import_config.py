# `tollgate import FILE`: another gateway's configuration as a tollgate.yaml, and a line for all that is not in it.

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import blake2s
from pathlib import Path

import typer

from gateway.config.file import load_settings
from gateway.config.tree import ConfigFaults
from gateway.importing.draft import Draft
from gateway.importing.litellm import read_litellm
from gateway.importing.portkey import read_portkey
from gateway.importing.source import Note, Part, read_source
from gateway.terminal.printing import counted

NAMED = re.compile(r"os\.environ/(\w+)")
URLS = {"DATABASE_URL": "postgresql://u:p@host/db", "REDIS_URL": "redis://host"}


class Unrecognised(Exception):
    """The file is of no gateway that is known here."""


def import_file(file: Path, out: Path, name: str) -> int:
    """Write ``file`` as ``out`` and say what is not in it; return 1 where nothing could be written."""
    if out.exists():
        typer.echo(f"{out} is there already: move it, or name another file with --out.", err=True)
        return 1
    try:
        draft = draft_of(read_source(file), name, NAMED.findall(file.read_text("utf-8", "replace")))
    except ConfigFaults as exc:
        typer.echo(str(exc), err=True)
        return 1
    except Unrecognised as exc:
        typer.echo(f"{file}: {exc}", err=True)
        return 1
    out.write_text(draft.to_yaml())
    for note in sorted({*draft.notes}):
        typer.echo(f"{file}:{note.line}: {note.path}: {note.words}")
    faults = left_to_say(out)
    for fault in faults:
        typer.echo(f"{out}:{fault.line}: {fault.path}: {fault.words}")
    held = f"{counted(len(draft.models), 'model')} at {counted(len(draft.providers), 'provider')}"
    rest = f"; {len(faults)} things are left to be said there" if faults else ""
    typer.echo(f"{out}: {held}; {len({*draft.notes})} things of {file.name} are as told above{rest}")
    return 0


def draft_of(root: Part, name: str, named: Iterable[str] = ()) -> Draft:
    """Return the draft of whichever gateway's configuration this is. ``named``: the variables that it names. Raises
    Unrecognised."""
    if root.has("model_list"):
        return read_litellm(root, named)
    if root.has("targets") or root.has("provider") or root.has("virtual_key") or root.has("strategy"):
        return read_portkey(root, name)
    right = "LiteLLM's proxy configuration has `model_list`, Portkey's config `provider`, or `strategy` and `targets`"
    raise Unrecognised(f"neither LiteLLM's nor Portkey's: {right}")


def left_to_say(out: Path) -> list[Note]:
    """Return the faults of a draft, but for variables that are not set."""
    try:
        load_settings(out, _Set())
    except ConfigFaults as exc:
        return [Note(fault.line, fault.path, fault.message) for fault in exc.faults]
    return []


class _Set(dict[str, str]):
    """Variables that are all set."""

    def __missing__(self, name: str) -> str:
        return self.get(name)

    def get(self, name: str, default: object = None) -> str:
        if name in URLS:
            return URLS[name]
        if "BASE" in name:
            return "https://host.example" if "AZURE" in name else "https://host.example/v1"
        return blake2s(name.encode()).hexdigest()

    def __contains__(self, name: object) -> bool:
        return True
