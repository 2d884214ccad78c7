# What the content policy costs: rules, classifier, both as a gateway has them, and the encoder beside them in its
# process, over words in no order, these pages, Python's library and hostile text. A processor that others use has two
# speeds: `least` is the median of each text's least of three rounds, p50 and p99 are of all. The first calls after
# loading are told apart: they are warm already.
#   python -m benchmarks.safety

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from string import ascii_lowercase
from time import thread_time
from typing import TYPE_CHECKING

from gateway.moderation.classifier.classifier import Classifier, readings
from gateway.moderation.classifier.hidden import hidden
from gateway.moderation.classifier.plain import plain
from gateway.moderation.reading.encoder import is_installed, load_encoder
from gateway.moderation.rules.rules import find_by_rules, holds_phrase

if TYPE_CHECKING:
    from gateway.moderation.reading.encoder import Encode

SEED = 7
ENGLISH = (
    "the of a to in is how do I you please write explain function river history Paris with for and that it should be "
    "list python table summary letter question answer model city bread water music travel price school garden window"
)
HOSTILE = ("eyJ-", "://a:", "a1 ", "QUJD", "sk-", "%41", "4 1", "\u0410\u200b")  # each repeated


def main() -> None:
    """Print a table."""
    classifier, dice = Classifier.load(), random.Random(SEED)
    encode = load_encoder() if is_installed() else None

    def english(words: int) -> str:
        return " ".join(dice.choices(ENGLISH.split(), k=words))[: words * 100]

    def unheard(words: int) -> str:
        return " ".join("".join(dice.choices(ascii_lowercase, k=dice.randint(2, 9))) for _ in range(words))

    def piece_of(texts: list[str], most: int) -> str:
        text = dice.choice(texts)
        start = dice.randrange(max(1, len(text) - most))
        return text[start : start + most]

    def words_of(texts: list[str], count: int) -> str:
        return " ".join(piece_of(texts, 40 * count).split()[1 : count + 1])

    pages = [path.read_text() for path in sorted(Path(__file__).parents[1].glob("docs/*.md"))]
    code = [path.read_text("utf-8", "replace") for path in sorted(Path(random.__file__).parent.glob("*.py"))]
    cases: list[tuple[str, Callable[[], str], int]] = [
        ("20 words", lambda: english(20), 3000),
        ("200 characters", lambda: english(200)[:200], 3000),
        ("2,000 characters", lambda: english(2000)[:2000], 1000),
        ("20,000 characters", lambda: english(20_000)[:20_000], 100),
        ("20 words of docs", lambda: words_of(pages, 20), 3000),
        ("2,000 of docs", lambda: piece_of(pages, 2000), 1000),
        ("2,000 of Python", lambda: piece_of(code, 2000), 1000),
        ("20 words never seen", lambda: unheard(20), 1000),
        ("2,000 of words never seen", lambda: unheard(500)[:2000], 300),
        *((f"2,000 of {piece!r:.10}", lambda piece=piece: (piece * 2000)[:2000], 100) for piece in HOSTILE),
    ]
    print("Microseconds of CPU for one text; `first`: the slowest of the first ten after loading.")
    print(f"{'text':>26} {'check':>12} {'first':>7} {'least':>7} {'p50':>7} {'p99':>7}")
    for label, make, rounds in cases:
        texts = [make() for _ in range(rounds)]
        again = 1 if "never seen" in label else 3
        for name, check in (
            ("rules", _rules),
            ("classifier", partial(_judge, classifier)),
            ("both", partial(_both, classifier)),
        ):
            _measure(label, name, texts if name != "both" or again > 1 else [make() for _ in texts], check, again)
        if encode is not None:
            _measure(label, "encoder", texts[:100], partial(_encode, encode), 1)


def _encode(encode: Encode, text: str) -> None:
    encode(readings(text))


def _rules(text: str) -> list[str]:
    """Return what the text hides."""
    shown = plain(text)
    inside = hidden(shown)
    for one in (shown, *inside):
        find_by_rules(one)
        holds_phrase(one, ("project nightingale",))
    return inside


def _judge(classifier: Classifier, text: str, *, hides: bool = True) -> None:
    for window in readings(text, hides=hides):
        classifier.logits(window)


def _both(classifier: Classifier, text: str) -> None:
    """As the guard does it: what the rules have learnt of a text, that it hides nothing, the classifier goes by."""
    _judge(classifier, text, hides=bool(_rules(text)))


def _measure(label: str, name: str, texts: list[str], check: Callable[[str], object], rounds: int) -> None:
    spent: list[list[float]] = []
    for _ in range(rounds):
        spent.append([])
        for text in texts:
            started = thread_time()
            check(text)
            spent[-1].append((thread_time() - started) * 1e6)
    every = [one for some in spent for one in some]
    figures = [max(spent[0][:10]), _percentile(list(map(min, *spent)) if rounds > 1 else every, 0.5)]
    figures += [_percentile(every, 0.5), _percentile(every, 0.99)]
    print(f"{label:>26} {name:>12} " + " ".join(f"{figure:7.0f}" for figure in figures), flush=True)


def _percentile(figures: list[float], share: float) -> float:
    return sorted(figures)[min(len(figures) - 1, int(share * len(figures)))]


if __name__ == "__main__":
    main()
