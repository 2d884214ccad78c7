# Open chat, written for this project, because the outcomes are of exams: kinds of prompts that users type all day, and
# how often a small model's answer to such is as good. The chances are beliefs, not measurements: they are what one
# would bet on before asking, and weigh little. Shadow traffic measures what is true of a team's own traffic.

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

KINDS = Path(__file__).parent / "data" / "written.jsonl"
SEED = 20268
EACH = 60  # prompts of a kind, at most


class Kind(Struct, frozen=True):
    """One kind of prompt."""

    name: str
    chance: float  # that a small model's answer is as good as a large one's
    frames: tuple[str, ...]  # "$" stands for one of the fills
    fills: tuple[str, ...]


class Prompt(NamedTuple):
    """A written prompt."""

    text: str
    kind: str
    suffices: bool  # as often among its kind as is believed


def written_prompts() -> Iterator[Prompt]:
    """Yield the prompts of every kind, of which as many have a small model suffice as its chance says."""
    dice = random.Random(SEED)
    for kind in msgspec.json.Decoder(Kind).decode_lines(KINDS.read_bytes()):
        texts = list(dict.fromkeys(frame.replace("$", fill) for frame in kind.frames for fill in kind.fills))
        chosen = dice.sample(texts, min(EACH, len(texts)))
        enough = round(kind.chance * len(chosen))
        yield from (Prompt(text, kind.name, place < enough) for place, text in enumerate(chosen))
