# Texts to moderate, written for this project: insults, threats, hate, intimacy and self-harm in plain words, without
# slurs; and texts that speak of such things as news, medicine, law, history, advice, sport and stories do.
# The public sets have few of the short ones that users write to each other. Each is made of parts by fixed dice.

from __future__ import annotations

import random
from collections.abc import Iterator

from tools.moderation_training.texts.parts import read_parts

PARTS = read_parts("written_moderation")

SEED = 20266
EACH = 90  # texts of a kind that breaks the policy, and as many longer ones
SPOKEN_OF = 4  # texts of each subject that keeps it

SLOTS = {"$bad": "bad", "$noun": "nouns", "$group": "groups", "$who": "who"}
# What breaks the policy: lists of openings and endings, what links them, and the kinds it is of.
BROKEN = (
    (PARTS["insults"], PARTS["insulted"], ". ", ("harassment",)),
    (PARTS["threats"], PARTS["threatened"], "", ("harassment", "violence")),
    (PARTS["hate"], ["", "", ".", "!", ". Everybody knows it", ". Wake up"], "", ("hate",)),
    (PARTS["hate_threats"], ["", "", ".", "!", ". Who joins me?"], "", ("hate", "hate/threatening", "violence")),
    (PARTS["self_harm"], PARTS["sad"], "", ("self-harm",)),
    (PARTS["violence"], ["", "", ".", "!", ". I mean it", " today"], "", ("violence",)),
    (PARTS["sexual"], PARTS["lust"], "", ("sexual",)),
)
UNBROKEN_ENDINGS = ["", "", ".", "!", " today", ", they said"]
KEEPS = [texts for name, texts in PARTS.items() if name.startswith("keeps: ")]  # by subject


def written_to_moderate() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each text with the kinds of the content policy that it breaks: none, if it keeps it."""
    dice = random.Random(SEED)

    def filled(text: str) -> str:
        for slot, parts in SLOTS.items():
            text = text.replace(slot, dice.choice(PARTS[parts]))
        return text[:1].upper() + text[1:]

    def pair(openings: list[str], endings: list[str], link: str = "") -> str:
        text = filled(dice.choice(openings) + link + dice.choice(endings))
        return dice.choice((text, text, text.lower(), text.rstrip(".")))

    for openings, endings, link, kinds in BROKEN:
        for text in dict.fromkeys(pair(openings, endings, link) for _ in range(EACH)):
            yield text, kinds
    for name, sentences in PARTS.items():
        if name.startswith("post: "):
            of_post = tuple(name.removeprefix("post: ").split(", "))
            for _ in range(EACH):
                yield filled(" ".join(dice.sample(sentences, dice.randint(1, 4)))), of_post
    for openings in (PARTS["of_groups"], PARTS["of_people"]):
        for text in dict.fromkeys(pair(openings, UNBROKEN_ENDINGS) for _ in range(EACH)):
            yield text, ()
    for said in KEEPS:
        yield from ((text, ()) for text in said)
        for _ in range(SPOKEN_OF * 5):
            yield dice.choice(PARTS["lead"]) + " ".join(dice.sample(said, dice.randint(2, 4))), ()
