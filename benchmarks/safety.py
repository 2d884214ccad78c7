# What the content policy costs: rules and classifier over English of several lengths and over hostile text, CPU and
# wall, and what a call without a policy pays. The first calls after loading are told apart: they are warm already.
#   python -m benchmarks.safety

from __future__ import annotations

import random
import time
from collections.abc import Callable
from string import ascii_lowercase

from gateway.safety.classifier import Classifier
from gateway.safety.hidden import hidden
from gateway.safety.plain import plain
from gateway.safety.rules import find_by_rules, holds_phrase

SEED = 7
ENGLISH = (
    "the of a to in is how do I you please write explain function river history Paris with for and that it should be "
    "list python table summary letter question answer model city bread water music travel price school garden window"
)
HOSTILE = ("eyJ-", "://a:", "a1 ", "QUJD", "sk-", "%41", "4 1", "\u0410\u200b")  # each repeated


def main() -> None:
    """Print a table."""
    classifier, dice = Classifier.load(), random.Random(SEED)

    def english(words: int) -> str:
        return " ".join(dice.choices(ENGLISH.split(), k=words))[: words * 100]

    def characters(count: int) -> str:
        return english(count)[:count]

    def unheard(words: int) -> str:
        return " ".join("".join(dice.choices(ascii_lowercase, k=dice.randint(2, 9))) for _ in range(words))

    def rules(text: str) -> None:
        shown = plain(text)
        for one in (shown, *hidden(shown)):
            find_by_rules(one)
            holds_phrase(one, ("project nightingale",))

    both = (("rules", rules), ("classifier", classifier.score))
    print("Microseconds for one text; `first`: the slowest of the first ten after loading.")
    print(f"{'text':>24} {'check':>12} {'first':>8} {'CPU p50':>8} {'CPU p99':>8} {'wall p50':>9} {'wall p99':>9}")
    cases: list[tuple[str, Callable[[], str], int]] = [
        ("20 words", lambda: english(20), 5000),
        ("200 characters", lambda: characters(200), 5000),
        ("2,000 characters", lambda: characters(2000), 3000),
        ("20,000 characters", lambda: characters(20_000), 300),
        ("20 words never seen", lambda: unheard(20), 2000),
        ("2,000 of words never seen", lambda: unheard(500)[:2000], 500),
        *((f"2,000 of {piece!r:.10}", lambda piece=piece: (piece * 2000)[:2000], 200) for piece in HOSTILE),
    ]
    for label, make, rounds in cases:
        for name, check in both:
            _measure(label, name, [make() for _ in range(rounds)], check)


def _measure(label: str, name: str, texts: list[str], check: Callable[[str], object]) -> None:
    cpu, wall = [], []
    for text in texts:
        began, started = time.perf_counter(), time.thread_time()
        check(text)
        cpu.append(time.thread_time() - started)
        wall.append(time.perf_counter() - began)
    first = max(wall[:10]) * 1e6
    figures = [_percentile(cpu, 0.5), _percentile(cpu, 0.99)]
    spans = [_percentile(wall, 0.5), _percentile(wall, 0.99)]
    print(f"{label:>24} {name:>12} {first:8.0f} {figures[0]:8.0f} {figures[1]:8.0f} {spans[0]:9.0f} {spans[1]:9.0f}")


def _percentile(seconds: list[float], share: float) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))] * 1e6


if __name__ == "__main__":
    main()
