# The parts that texts are made of: data beside the code that puts them together. All were written for this project.

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

DATA = Path(__file__).parent / "data"


class Part(Struct, frozen=True):
    """One text of a list."""

    list: str
    text: str


def read_parts(name: str) -> dict[str, list[str]]:
    """Return the lists of a data file by their names, in its order: what is drawn of them depends on it."""
    lists: dict[str, list[str]] = {}
    for part in msgspec.json.Decoder(Part).decode_lines((DATA / f"{name}.jsonl").read_bytes()):
        lists.setdefault(part.list, []).append(part.text)
    return lists
