# What `tollgate dev` prints at its start: how to use the stack, in words or as JSON.

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import msgspec

from protocol.errors import Unshown


class Ready(Unshown, msgspec.Struct, frozen=True, kw_only=True):
    """What `tollgate dev --json` prints."""

    url: str
    team_id: str
    team_key: str
    admin_key: str
    models: list[str]
    database_url: str
    redis_url: str
    engine_url: str
    pids: dict[str, list[int]]


NAMED = 6  # models


def welcome(ready: Ready, data_dir: Path) -> str:
    """Return the greeting printed when the stack is up; the curl line works as pasted."""
    body = json.dumps({"model": "auto", "messages": [{"role": "user", "content": "What is Tollgate?"}]})
    return f"""
Tollgate is ready.

  URL        {ready.url}/v1
  team key   {ready.team_key}
  models     {_some(ready.models)}
  console    {ready.url}/console
  admin key  {ready.admin_key}

Ask it something:

  curl {ready.url}/v1/chat/completions -H 'Authorization: Bearer {ready.team_key}' \\
    -H 'Content-Type: application/json' -d '{body}'

Logs are in {data_dir / "logs"}. Ctrl-C ends it; the data stays.
"""


def _some(models: list[str]) -> str:
    """Return the models in words: ours first, then those of each provider whose key is set, by their number."""
    own = [name for name in models if "/" not in name]
    others = Counter(name.partition("/")[0] for name in models if "/" in name)
    named = [*own[:NAMED], *([f"{len(own) - NAMED} more"] if len(own) > NAMED else [])]
    return ", ".join((*named, *(f"{provider}/… ({count})" for provider, count in others.items())))
