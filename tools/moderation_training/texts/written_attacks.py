# Attacks written for this project, and prompts that only sound like them: what commands a model to forget its rules, to
# tell its secrets or to play a character without rules, and what plays, commands and asks for secrets without harm.
# Each is made of parts by fixed dice, as in written.py.

from __future__ import annotations

import random
from collections.abc import Iterator

from tools.moderation_training.texts.parts import read_parts

PARTS = read_parts("written_attacks")

SEED = 20265
COMMANDS, PERSONAS, STORIES, HOUSE_RULES = 260, 220, 160, 160  # texts of a kind


def written_attacks(harms: list[str], harmless: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each prompt with what it is, "attack" or "everyday"; ``harms`` and ``harmless``: what one can do."""
    dice = random.Random(SEED)

    def filled(text: str) -> str:
        name, harm = dice.choice(PARTS["names"]), dice.choice(harms)
        text = text.replace("$harm", f"how to {harm}").replace("$ask", f"how do I {harm}?")
        return text.replace("$name", name).replace("$role", dice.choice(PARTS["roles"])).replace("$do", harm)

    for _ in range(COMMANDS):
        link = dice.choice((" and ", ". ", ": ", ", then ", ". Now "))
        yield filled(dice.choice(PARTS["overrides"]) + link + dice.choice(PARTS["goals"]) + "."), "attack"
    yield from ((secret, "attack") for secret in PARTS["secrets"])
    for _ in range(PERSONAS):
        said = [dice.choice(PARTS["becomes"]), *dice.sample(PARTS["persona"], dice.randint(2, 9))]
        name = dice.choice(PARTS["names"])
        yield filled(" ".join(said).replace("$name", name)), "attack"
    for place in range(STORIES):
        frame, insist = dice.choice(PARTS["frames"]), " ".join(dice.sample(PARTS["insists"], dice.randint(0, 2)))
        yield filled(f"{frame} {insist}".strip()), "attack"
        if place % 2:
            yield f"{frame.replace('$do', dice.choice(harmless))} {dice.choice(PARTS['manners'])}", "everyday"
    for _ in range(HOUSE_RULES):
        said = [dice.choice(PARTS["play"]), *dice.sample(PARTS["manners"], dice.randint(1, 6))]
        yield filled(" ".join(said)), "everyday"
    for who in PARTS["who"]:
        for _ in range(4):
            yield f"{dice.choice(PARTS['imagine']).replace('$who', who)}. {dice.choice(PARTS['then'])}", "everyday"
    yield from ((prompt, "everyday") for prompt in PARTS["plain"])
