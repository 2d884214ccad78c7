# What the demo model is taught: lessons, each one answer and the questions that call for it, read from data/*.jsonl.
# A question may hold slots such as {country}, filled from tools/demo_training/data/slots.json, so that refusals see a
# wide world.

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent / "data"
OFF_TOPIC = "off_topic"

_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Lesson:
    """One answer and its questions; ``held_out`` phrasings are never trained on and measure what was understood."""

    id: str
    topic: str  # the data file's name
    answer: str
    questions: tuple[str, ...]
    held_out: tuple[str, ...]
    weight: int = 1  # how often it is taught beside the others: what most users ask first must not fail
    follow_ups: tuple[str, ...] = ()  # asked after another lesson of the same topic: "And how do I revoke it?"


def read_lessons(folder: Path = DATA) -> list[Lesson]:
    """Every lesson of every ``*.jsonl`` file in ``folder``, in the files' order; a faulty line raises ValueError."""
    lessons = []
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                lessons.append(_decode(path.stem, json.loads(line)))
            except (KeyError, TypeError, ValueError) as exc:
                raise ValueError(f"{path.name}:{number}: {exc!r}") from exc
    return lessons


def read_slots(folder: Path = DATA) -> dict[str, list[str]]:
    """The words each slot can be filled with."""
    slots: dict[str, list[str]] = json.loads((folder / "slots.json").read_text(encoding="utf-8"))
    return slots


def fill_slots(question: str, slots: dict[str, list[str]], rng: random.Random) -> str:
    """The question with a word drawn for each of its slots."""
    return _SLOT.sub(lambda match: rng.choice(slots[match[1]]), question)


def _decode(topic: str, fields: dict) -> Lesson:
    return Lesson(
        id=fields["id"],
        topic=topic,
        answer=fields["answer"],
        questions=tuple(fields["questions"]),
        held_out=tuple(fields.get("held_out", ())),
        weight=int(fields.get("weight", 1)),
        follow_ups=tuple(fields.get("follow_ups", ())),
    )
