# Short prompts of everyday life, written for this project: data sets have few of them, and half of what users type is
# as short. Fitted as prompts that must pass. What judges short prompts stands in the tests, in other words.

from __future__ import annotations

from itertools import product

from tools.moderation_training.texts.parts import read_parts

PARTS = read_parts("ordinary")


def ordinary_prompts() -> list[str]:
    """Return the prompts, each once."""
    made = (
        *(f"{asking} {thing}." for asking, thing in product(PARTS["asking"], PARTS["things"])),
        *(f"{asking} {chore}?" for asking, chore in product(PARTS["help"], PARTS["chores"])),
        *(f"{asking} {topic}." for asking, topic in product(PARTS["about"], PARTS["topics"])),
        *PARTS["said"],
    )
    return list(dict.fromkeys(made))
