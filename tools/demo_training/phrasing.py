# The many ways users type one question. Training sees each written phrasing through these lenses, so that the model
# reads meaning where it could have learnt spelling: other openings, synonyms, case, punctuation, courtesy, slips.

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

from tools.demo_training.lessons import DATA

_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")


@dataclass(frozen=True, slots=True)
class Wordings:
    """The word lists of ``tools/demo_training/data/wordings.json``: ways to say the same thing."""

    openings: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...]  # a question's form; its others, {} for the rest
    synonyms: dict[str, tuple[str, ...]]
    before: tuple[str, ...]
    after: tuple[str, ...]
    service_names: tuple[str, ...]  # what users call Tollgate
    small_words: frozenset[str]  # dropped by those in a hurry
    system_prompts: tuple[str, ...]


def read_wordings(folder: Path = DATA) -> Wordings:
    """The word lists, ready for use."""
    lists = json.loads((folder / "wordings.json").read_text(encoding="utf-8"))
    return Wordings(
        openings=tuple((re.compile(o["pattern"], re.IGNORECASE), tuple(o["others"])) for o in lists["openings"]),
        synonyms={word: tuple(others) for word, others in lists["synonyms"].items()},
        before=tuple(lists["before"]),
        after=tuple(lists["after"]),
        service_names=tuple(lists["service_names"]),
        small_words=frozenset(lists["small_words"]),
        system_prompts=tuple(lists["system_prompts"]),
    )


def vary(question: str, words: Wordings, rng: random.Random) -> str:
    """One way a person could have typed ``question``; about one in six comes back as written."""
    if rng.random() < 0.16:
        return question
    text, mark = _split_mark(question)
    if rng.random() < 0.45:
        text = _reopen(text, words, rng)
    if rng.random() < 0.5:
        text = _swap_words(text, words, rng, share=rng.choice((0.2, 0.5)))
    if rng.random() < 0.06:
        text = re.sub(r"\b[Tt]ollgate\b", lambda _: rng.choice(words.service_names), text, count=1)
    text = _contract(text, rng)
    if rng.random() < 0.15:
        text = _drop_small_words(text, words, rng, share=rng.choice((0.2, 0.3, 1.0)))
    text = _frame(text, mark, words, rng)
    if rng.random() < 0.12:
        text = _mistype(text, rng)
    return _recase(text, rng)


def _split_mark(question: str) -> tuple[str, str]:
    stripped = question.rstrip("?.!")
    return stripped, question[len(stripped) :]


def _reopen(text: str, words: Wordings, rng: random.Random) -> str:
    fitting = [(found, others) for pattern, others in words.openings if (found := pattern.fullmatch(text))]
    if not fitting:
        return text
    found, others = rng.choice(fitting)
    rest = " ".join(found.groups())
    opened = rng.choice(others).format(rest)
    return opened[0].upper() + opened[1:]


def _swap_words(text: str, words: Wordings, rng: random.Random, share: float) -> str:
    def swap(match: re.Match[str]) -> str:
        others = words.synonyms.get(match[0].lower())
        return rng.choice(others) if others and rng.random() < share else match[0]

    return _WORD.sub(swap, text)


def _contract(text: str, rng: random.Random) -> str:
    if rng.random() < 0.3:
        text = re.sub(r"\b([Ww]hat|[Ww]here|[Ww]ho|[Hh]ow) is\b", r"\1's", text)
        text = re.sub(r"\b(do|does|is|are|can|did)( no|n)t\b", r"\1nt" if rng.random() < 0.3 else r"\1n't", text)
    elif rng.random() < 0.3:
        text = re.sub(r"\b([Ww]hat|[Ww]here|[Ww]ho)'s\b", r"\1 is" if rng.random() < 0.6 else r"\1s", text)
    return text


def _drop_small_words(text: str, words: Wordings, rng: random.Random, share: float) -> str:
    kept = [word for word in text.split() if word.lower() not in words.small_words or rng.random() > share]
    return " ".join(kept) if len(kept) > 1 else text


def _frame(text: str, mark: str, words: Wordings, rng: random.Random) -> str:
    if rng.random() < 0.2:
        before = rng.choice(words.before)
        keeps_capital = (
            before.rstrip()[-1] in ".!" or not text[:1].isupper() or text[1:2].isupper() or text.startswith("I ")
        )
        text = before + (text if keeps_capital or text.startswith("Tollgate") else text[:1].lower() + text[1:])
    after = rng.choice(words.after) if rng.random() < 0.18 else ""
    if after[1:2].isupper():
        return text + mark + after
    return text + after + _close(mark, rng)


def _close(mark: str, rng: random.Random) -> str:
    if rng.random() < 0.7:
        return mark
    return rng.choice(("", "", "", "?", "??", " ?", ".", "!", "...", "?!", "\n"))


def _mistype(text: str, rng: random.Random) -> str:
    typed = text.split(" ")
    places = [i for i, word in enumerate(typed) if len(word) > 3]
    if not places:
        return text
    place = rng.choice(places)
    word = typed[place]
    at = rng.randrange(1, len(word) - 1)
    slips = (
        word[:at] + word[at + 1] + word[at] + word[at + 2 :],  # two letters swapped
        word[:at] + word[at + 1 :],  # one missing
        word[:at] + word[at] + word[at:],  # one doubled
        word[:at] + rng.choice("abcdefghijklmnopqrstuvwxyz") + word[at + 1 :],  # a neighbour's key
    )
    typed[place] = rng.choice(slips)
    return " ".join(typed)


def _recase(text: str, rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.28:
        return text.lower()
    if draw < 0.37:
        return text.upper()
    if draw < 0.40:
        return text.title()
    return text
