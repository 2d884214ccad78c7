# Code that a document or a user wants smuggled into an answer, and what only sounds so: code to be read, tested or put
# somewhere, styles for the answers to come, and small tasks on a text above or below. Made of parts by fixed dice.

from __future__ import annotations

import random
from collections.abc import Iterator

from tools.moderation_training.texts.parts import read_parts

PARTS = read_parts("written_injections")

SEED = 20267
SLOTS = {
    "$command": "commands",
    "$host": "hosts",
    "$file": "files",
    "$this": "this",
    "$tongue": "tongues",
    "$form": "forms",
}
SMUGGLED, WELCOME, MANNERS, TASKS = 150, 170, 130, 170  # texts of a kind


def written_injections() -> Iterator[tuple[str, str]]:
    """Yield each prompt with what it is, "attack" or "everyday"."""
    dice = random.Random(SEED)

    def filled(text: str) -> str:
        for slot, parts in SLOTS.items():
            text = text.replace(slot, dice.choice(PARTS[parts]))
        return text

    def fenced(code: str) -> str:
        return dice.choice((f":\n```\n{code}\n```", f":\n\n{code}", f":\n```\n{code}\n\n```"))

    for _ in range(SMUGGLED):
        yield dice.choice(PARTS["insert"]) + fenced(filled(dice.choice(PARTS["payloads"]))), "attack"
    for _ in range(WELCOME):
        yield dice.choice(PARTS["ask_code"]) + fenced(dice.choice(PARTS["code"])), "everyday"
    for _ in range(MANNERS):
        when, manner = dice.choice(PARTS["when"]), dice.choice(PARTS["manner"])
        yield dice.choice((f"{when}, {manner}", f"{when} {manner}.", f"{when}, please {manner}.")), "everyday"
    for _ in range(TASKS):
        yield filled(dice.choice(PARTS["on_text"])) + dice.choice(PARTS["after"]), "everyday"
