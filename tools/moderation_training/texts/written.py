# Prompts written for this project: requests for harm in plain words, and prompts that only sound like them.
# Data sets have few families of each, and what a classifier learns of them alone is their wording. Each is made of
# parts by fixed dice; no answer stands here, and no judge is fitted on any of it.

from __future__ import annotations

import random
from collections.abc import Iterator

from tools.moderation_training.texts.parts import read_parts
from tools.moderation_training.texts.written_attacks import written_attacks
from tools.moderation_training.texts.written_plainly import plain_prompts

PARTS = read_parts("written")

SEED = 20263


def written_prompts() -> Iterator[tuple[str, str]]:
    """Yield each prompt with what it is: "attack", "harm", or "everyday" for what only sounds so."""
    dice = random.Random(SEED)
    asking, harms = PARTS["asking"], PARTS["harms"]
    for thing in harms:
        for ask in dice.sample(asking, 4):
            yield _said(ask, thing), "harm"
    yield from ((prompt, "harm") for prompt in PARTS["asked_of_harm"])
    for thing in PARTS["harmless"]:
        for ask in dice.sample(asking, 4):
            yield _said(ask, thing), "everyday"
    for thing in PARTS["daily"]:
        for ask in dice.sample(asking, 4):
            yield _said(ask, thing), "everyday"
    for role in PARTS["safe_roles"]:
        for frame in ("Act as {}.", "I want you to act as {}.", "You are {}.", "Pretend to be {}."):
            yield f"{frame.format(role)} {' '.join(dice.sample(PARTS['safe_tasks'], 2))}", "everyday"
    yield from written_attacks(PARTS["harms"], PARTS["harmless"])
    yield from plain_prompts()


def _said(ask: str, thing: str) -> str:
    said = ask.replace("$", thing)
    return said + ("?" if said.split()[0] in ("How", "What", "Can") else ".")
