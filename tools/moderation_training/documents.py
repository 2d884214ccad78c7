# How often attacks are found in documents that tools return (prompt injection), by a model that never saw them:
# the document read as a whole, as what a user says is, and in passages, as what tools tell is besides.
#   python -m tools.moderation_training.documents --data DATA --vectors FILE...

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from sklearn.model_selection import StratifiedKFold

from gateway.moderation.classifier.classifier import HEADS
from gateway.moderation.classifier.features import passages
from tools.moderation_training.answers import docstrings
from tools.moderation_training.dataset import JUDGED_WORK, OURS, Examples, read_examples
from tools.moderation_training.evaluate import wilson
from tools.moderation_training.fit import MAY_FLAG, SEED, FittedSafety, Floats
from tools.moderation_training.meaning import read_vectors
from tools.moderation_training.windows import windows_of

PARTS = 3  # of which one judges
SHORTEST, LONGEST = 600, 1500  # characters of a document
SENTENCES = 12  # to a document, where a source has no more than sentences


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate how attacks inside documents are found.")
    parser.add_argument("--data", type=Path, required=True, help="folder with safety/ and routing/")
    parser.add_argument("--vectors", type=Path, nargs="+", required=True, help="vectors of words, text or .npz")
    arguments = parser.parse_args()
    examples = read_examples(arguments.data)
    dice = np.random.default_rng(SEED)
    ours = np.isin(examples.source, OURS)
    fitted = np.flatnonzero(examples.may_be_fitted & ~ours)
    split = StratifiedKFold(PARTS, shuffle=True, random_state=SEED).split(fitted, examples.source[fitted])
    train, test = next(iter(split))
    known = examples.take(np.union1d(fitted[train], np.flatnonzero(ours)))
    model = FittedSafety(read_vectors(arguments.vectors)).fit(known, windows_of(known.texts), heads=("attack",))
    judged = examples.take(np.sort(fitted[test]))

    def logits(texts: list[str]) -> Floats:
        return model.logits(windows_of(texts))[:, HEADS.index("attack")]

    benign = logits(judged.take(judged.task == "benign").texts)
    point = float(np.quantile(benign, 1 - MAY_FLAG["attack"]))
    texts = documents(examples, dice)
    plain = [text[:LONGEST] for text in docstrings() if len(text) >= SHORTEST]
    print("| documents of 600 to 1,500 characters | count | as a whole [95 %] | in passages [95 %] |")
    print("|---|---|---|---|")
    print(_row("without an attack: code, logs, tables, JSON, sentences", texts, logits, point))
    print(_row("without an attack: docstrings of Python", plain, logits, point))
    for source in np.unique(judged.source[judged.task == "attack"]):
        attacks = judged.take((judged.task == "attack") & (judged.source == source)).texts
        print(_row(f"with an attack: {source}", [put_into(attack, texts, dice) for attack in attacks], logits, point))


def documents(examples: Examples, dice: np.random.Generator) -> list[str]:
    """Return everyday texts of work that are in no fit."""
    work = examples.take(np.char.startswith(examples.source, JUDGED_WORK))
    sentences = [text for text in work.texts if len(text) < SHORTEST]
    joined = [" ".join(dice.choice(sentences, SENTENCES).tolist()) for _ in range(len(sentences) // SENTENCES)]
    return [text[:LONGEST] for text in (*work.texts, *joined) if len(text) >= SHORTEST]


def put_into(attack: str, texts: list[str], dice: np.random.Generator) -> str:
    """Return one of some documents with an attack between two of its words."""
    text = texts[dice.integers(len(texts))]
    place = text.rfind(" ", 0, int(dice.integers(1, len(text)))) + 1
    return f"{text[:place]}\n{attack}\n{text[place:]}"


def _row(name: str, texts: list[str], logits: Callable[[list[str]], Floats], point: float) -> str:
    pieces = [passages(text) for text in texts]
    scores = logits([passage for some in pieces for passage in some])
    starts = np.cumsum([0, *map(len, pieces)])[:-1]
    columns = []
    for found in (logits(texts) > point, np.maximum.reduceat(scores, starts) > point):
        low, high = wilson(found)
        columns.append(f"{found.mean():.3f} [{low:.3f}, {high:.3f}]")
    return f"| {name} | {len(texts)} | {' | '.join(columns)} |"


if __name__ == "__main__":
    main()
