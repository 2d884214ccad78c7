# `tollgate init`: a tollgate.yaml that offers the models of some providers of the catalogue, and the secrets that a new
# deployment needs, in a file beside it.

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from gateway.config.fields import meant
from gateway.config.presets import Preset, presets
from gateway.core.keys import new_admin_key
from gateway.core.private_files import write_privately
from gateway.terminal.printing import fail, say

HEAD = """\
# Every setting with its default: docs/configuration.md. To check this file: tollgate config check {out}
# Its variables are in {env}: `set -a; . ./{env}; set +a` sets them in a shell.

database_url: ${{DATABASE_URL}}
redis_url: ${{REDIS_URL}}
data_dir: ${{TOLLGATE_DATA_DIR:-/var/lib/tollgate}} # of the journal: a disk that outlives containers
admin_keys: ["${{TOLLGATE_ADMIN_KEY}}"]
key_pepper: ${{TOLLGATE_KEY_PEPPER}}

providers:
"""
UNPRICED = "# its models have no list price: name them under `models`, each with its price"


def command(
    provider: Annotated[
        list[str] | None, typer.Option("--provider", help="Of the catalogue, once for each; default: those with a key")
    ] = None,
    out: Annotated[Path, typer.Option(help="The file to write; it must not be there yet")] = Path("tollgate.yaml"),
) -> None:
    """Write a tollgate.yaml with providers of the catalogue, and its secrets, made fresh, into tollgate.env (0600)."""
    env = out.with_suffix(".env")
    for path in (out, env):
        if path.exists():
            fail(f"{path} is there already: move it, or name another file with --out")
    chosen = provider or [name for name, row in presets().items() if any(map(os.environ.get, row.keys))]
    if not chosen:
        fail(f"which providers? Give --provider, once for each: {', '.join(presets())}", 2)
    for name in chosen:
        if name not in presets():
            fail(f"no provider {name!r} in the catalogue; {meant(name, presets())}", 2)
    out.write_text(_config(chosen, out, env))
    write_privately(env, _variables(chosen, os.environ).encode())
    say(f"{out} offers the models of {', '.join(chosen)}; {env} has its secrets, for your eyes alone")
    say(f"next: say in {env} where Postgres and Redis are, and the keys that are missing; then\n")
    say(f"  set -a; . ./{env}; set +a\n  tollgate config check {out}\n  tollgate migrate --config {out}")
    say(f"  tollgate doctor --config {out}\n  tollgate serve --config {out}")


def _config(chosen: Sequence[str], out: Path, env: Path) -> str:
    from gateway.model_facts.price_library import knows_provider  # a quarter of a second

    lines = [HEAD.format(out=out.name, env=env.name)]
    for name in dict.fromkeys(chosen):
        row = presets()[name]
        offer = 'models: "*"' if knows_provider(row.base_url) and row.keys else ""
        optional = "optional: true" if row.keys else ""
        said = ", ".join(filter(None, (optional, offer)))
        lines.append(f"  {name}: {{{said}}}{'' if offer else f' {UNPRICED}'}\n")
    return "".join(lines)


def _variables(chosen: Sequence[str], known: Mapping[str, str]) -> str:
    """Return the file of variables: secrets made now, and what is still to be said. Keys that the environment has are
    not copied."""
    lines = [
        f"TOLLGATE_ADMIN_KEY={new_admin_key()}",
        f"TOLLGATE_KEY_PEPPER={secrets.token_urlsafe(32)}",
        "DATABASE_URL=postgresql://user:password@127.0.0.1:5432/tollgate",
        "REDIS_URL=redis://127.0.0.1:6379/0",
        "TOLLGATE_DATA_DIR=./data",
        *(f"{row.keys[0]}=" for row in map(presets().__getitem__, dict.fromkeys(chosen)) if _is_missing(row, known)),
    ]
    return "\n".join(lines) + "\n"


def _is_missing(row: Preset, known: Mapping[str, str]) -> bool:
    return bool(row.keys) and not any(map(known.get, row.keys))
