# Requests for harm in ten languages beside English, and everyday ones that stand as they do, written for this project;
# of nine more languages everyday ones alone, so that a language is no sign of harm.
# Few sets have any, and what is fitted on English alone finds next to nothing in them. Made of parts by fixed dice.

from __future__ import annotations

import random
from collections.abc import Iterator

from tools.moderation_training.texts.parts import read_parts

LANGUAGES = (
    "zh",
    "it",
    "vi",
    "ar",
    "ko",
    "th",
    "bn",
    "sw",
    "jv",
    "fr",
    "es",
    "de",
    "pt",
    "ru",
    "ja",
    "hi",
    "id",
    "nl",
    "pl",
    "tr",
)
SEED = 20268
OF_EACH = 3  # ways in which one thing is asked for


def written_languages() -> Iterator[tuple[str, str, str]]:
    """Yield each prompt with what it is, "harm" or "everyday", and its language."""
    dice, parts = random.Random(SEED), read_parts("written_languages")
    for language in LANGUAGES:
        asking = parts.get(f"{language} asking", [])
        for things, task in (("harm", "harm"), ("harmless", "everyday")):
            for thing in parts.get(f"{language} {things}", []):
                for ask in dice.sample(asking, OF_EACH):
                    yield ask.replace("$", thing), task, language
        for said, task in (("harmful", "harm"), ("innocent", "everyday")):
            yield from ((prompt, task, language) for prompt in parts.get(f"{language} {said}", []))
