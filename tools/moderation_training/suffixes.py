# Fits what finds suffixes that an optimiser has appended: how improbable each passage of a text is, and a small network
# on its form (gateway.moderation.classifier.surprise). No published suffix is fitted: what is found of them is of
# strangers. What must pass is judged by the half that the fit has not seen; the other heads of the artefact stay.
#   python -m tools.moderation_training.suffixes --data DATA --out gateway/moderation/classifier/artifacts

from __future__ import annotations

import argparse
import importlib
import json
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

from gateway.moderation.classifier.classifier import FORMAT, MANIFEST, WEIGHTS
from gateway.moderation.classifier.surprise import (
    STEP,
    STEPS,
    SYMBOLS,
    WINDOW,
    Surprise,
    passages_of,
    symbols_of,
    triples_of,
)
from router.complexity.artifact import Arrays, read_artifact, write_artifact
from tools.moderation_training.dataset import OURS, Examples, read_examples
from tools.moderation_training.families import ATTACKS, passing
from tools.moderation_training.fit import without_suffixes
from tools.moderation_training.texts.strange_forms import StrangeForms, messages_of
from tools.moderation_training.texts.token_salad import TokenSalad
from tools.moderation_training.texts.work import PACKAGES

SEED = 20270
LONGEST = 6000  # characters of a text that are fitted
PIECE = 4000  # of a file
SHORT = 600  # of a request that tokens are put to
FORMS, TONGUES, SALADS = 5000, 5000, 12_000  # texts that are made
OF_FILES, OF_MADE, OF_MESSAGES = 0.6, 0.6, 0.15  # what those count beside prompts
HIDDEN, NETWORKS = 24, 3
MAY_FLAG = 0.04  # of documents that were not fitted, by form alone: nine in ten of these are far from a finding
LEAST = 2  # times that three symbols follow each other, else they count as never seen

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Texts = Sequence[tuple[str, float]]  # and what each counts


class Fitted(Struct, frozen=True):
    """What serving needs, but for the operating point."""

    arrays: Arrays

    def scores(self, texts: Sequence[str]) -> Floats:
        """Return what is said of texts."""
        served = Surprise(self.arrays)
        return np.array([served.logit(text[:16_000]) for text in texts])


def fit(texts: Texts, requests: Sequence[str], code: Sequence[str]) -> Fitted:
    """Fit on ``texts`` that must pass, and on ``requests`` to which tokens in no order are put.

    A text is read by a table that the other half of them makes, for none is improbable to the table that it made.
    """
    halves = np.random.default_rng(SEED).random(len(texts)) < 0.5
    counts = [_counts([text for text, is_one in zip(texts, halves, strict=True) if is_one == half]) for half in (0, 1)]
    salad, dice = TokenSalad(code, SEED), random.Random(SEED)
    tables = [_table(count) for count in counts]
    readers = [_reader(table) for table in tables]
    read, wanted, weight = [], [], []
    for (text, count), half in zip(texts, halves, strict=True):
        seen = readers[1 - int(half)](text)
        read.append(seen)
        wanted.append(np.zeros(len(seen), bool))
        weight.append(np.full(len(seen), count / len(seen) ** 0.5))
    for place in range(SALADS):
        whole, first, last = salad.beside(dice.choice(requests))
        seen = readers[place % 2](whole)
        starts = np.arange(len(seen)) * STEP
        covered = np.minimum(starts + WINDOW, last) - np.maximum(starts, first)
        chosen = covered > 0.6 * min(last - first, WINDOW)
        chosen[np.argmax(covered)] = True
        read.append(seen[chosen])
        wanted.append(np.ones(chosen.sum(), bool))
        weight.append(np.full(chosen.sum(), 1 / chosen.sum()))
    return Fitted(_table(counts[0] + counts[1]) | _network(np.vstack(read), np.hstack(wanted), np.hstack(weight)))


def _network(read: npt.NDArray[np.float32], wanted: Flags, weight: Floats) -> Arrays:
    """Fit some networks, whose mean is served: one alone says too different things of what no fit has seen."""
    weight[wanted] *= weight[~wanted].sum() / weight[wanted].sum()
    middle, spread = read.astype(np.float64).mean(axis=0), read.astype(np.float64).std(axis=0) + 1e-3
    seen, nets = ((read - middle) / spread).astype(np.float32), []
    for seed in range(NETWORKS):
        net = MLPClassifier(
            (HIDDEN,), alpha=0.03, max_iter=8, batch_size=256, learning_rate_init=0.002, random_state=seed + 1
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # it stops after its rounds
            nets.append(net.fit(seen, wanted, sample_weight=weight / weight.mean()))
    into = np.hstack([net.coefs_[0] / spread[:, None] for net in nets])
    hidden = np.concatenate([net.intercepts_[0] for net in nets]) - middle @ into
    return {
        "surprise_in": into.astype(np.float32),
        "surprise_hidden": hidden.astype(np.float32),
        "surprise_out": np.concatenate([net.coefs_[1][:, 0] / NETWORKS for net in nets]).astype(np.float32),
        "surprise_bias": np.array(np.mean([net.intercepts_[1][0] for net in nets]), np.float32),
    }


def _counts(texts: Texts) -> Floats:
    """Return how often which three symbols follow each other."""
    counts = np.zeros(SYMBOLS**3)
    for start in range(0, len(texts), 500):
        some = texts[start : start + 500]
        triples = [triples_of(symbols_of(text)) for text, _ in some]
        weights = np.repeat([count for _, count in some], [len(each) for each in triples])
        counts += np.bincount(np.concatenate(triples), weights, SYMBOLS**3)
    return counts


def _table(counts: Floats) -> Arrays:
    """Return how surprising a symbol is after two: as these say, after one where they say little."""
    by_context = counts.reshape(-1, SYMBOLS)
    pairs = counts.reshape(SYMBOLS, SYMBOLS, SYMBOLS).sum(axis=0)
    alone = (pairs.sum(axis=0) + 1) / (pairs.sum() + SYMBOLS)
    after_one = (pairs + 20 * alone) / (pairs.sum(axis=1, keepdims=True) + 20)
    often = by_context.sum(axis=1)
    after_two = (by_context + 10 * np.tile(after_one, (SYMBOLS, 1))) / (often + 10)[:, None]
    seen = np.flatnonzero(counts >= LEAST)
    return {
        "surprise_pairs": _steps(after_one.ravel()),
        "surprise_contexts": np.rint(np.log2((often + 10) / 10) * STEPS).clip(0, 255).astype(np.uint8),
        "surprise_gaps": np.diff(seen, prepend=0).astype(np.uint32),  # smaller, once compressed
        "surprise_steps": _steps(after_two.ravel()[seen]),
    }


def _steps(shares: Floats) -> npt.NDArray[np.uint8]:
    return np.rint(-np.log2(shares) * STEPS).clip(0, 16 * STEPS - 1).astype(np.uint8)


def _reader(table: Arrays) -> Callable[[str], npt.NDArray[np.float32]]:
    """Return what reads the form of each passage of a text by a table."""
    served = Surprise(table | without_suffixes())

    def read(text: str) -> npt.NDArray[np.float32]:
        symbols = symbols_of(text)
        return passages_of(symbols, served.bits(symbols))

    return read


def files_of(root: Path) -> Iterator[str]:
    """Yield pieces of files: of the packages that work.py names (PSF-2.0), and of this project."""
    dice = random.Random(SEED)
    for text in (*code_of_packages(), *_project(root, dice)):
        for start in range(0, min(len(text), 10 * PIECE), PIECE):
            piece = text[start : start + PIECE]
            yield piece if dice.random() < 0.5 else piece[: dice.randint(100, 2000)]


def code_of_packages() -> Iterator[str]:
    """Yield the modules of the packages that work.py names."""
    for name in PACKAGES:
        for folder in importlib.import_module(name).__path__:
            for path in sorted(Path(folder).glob("*.py")):
                yield path.read_text(encoding="utf-8")


def _project(root: Path, dice: random.Random) -> Iterator[str]:
    code = [f"{package}/**/*.py" for package in ("gateway", "gpu_backend", "billing", "router", "benchmarks")]
    others = ("**/*.yaml", "**/*.toml", "gateway/**/*.lua", "gateway/http/console/*.js", "gateway/**/*.css")
    for kind in ("docs/**/*.md", *code, *others, "tests/**/*.json"):
        paths = [path for path in sorted(root.glob(kind)) if not any(part[0] == "." for part in path.parts)]
        dice.shuffle(paths)
        yield from (path.read_text(encoding="utf-8")[:12_000] for path in paths[:250])


def fitted_rows(examples: Examples) -> Flags:
    """Return which rows are fitted, all of them to pass: half of those that may be, by their text, and all of ours."""
    must_pass = np.isin(examples.task, ("benign", "everyday", "keeps", "harm", "breaks"))
    every = must_pass & examples.may_be_fitted & (examples.source != "bipia_documents")
    ours = np.isin(examples.source, (*OURS, "ordinary"))
    marks = np.array([sha256(b"form" + text.encode("utf-8", "replace")).digest()[0] for text in examples.texts])
    return every & (ours | (marks % 2 == 0))


def report_lines(examples: Examples, scores: Floats, point: float, judged: Flags) -> Iterator[str]:
    """Yield the table of what is flagged by form alone: suffixes that were never fitted, and what must pass."""
    attacks = examples.task == "attack"
    rows = {f"attacks: {family}": attacks & np.isin(examples.source, sources) for family, sources in ATTACKS.items()}
    kinds = zip(("hard benign", "everyday", "documents"), passing(examples), strict=True)
    rows |= {f"{name}, not fitted": kind & judged for name, kind in kinds}
    rows["harm, not fitted"] = (examples.task == "harm") & judged
    yield "| by form alone | rows | flagged |"
    yield "|---|---|---|"
    yield from (f"| {name} | {of.sum()} | {(scores[of] > point).mean():.4f} |" for name, of in rows.items())


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit and judge what finds suffixes by their form.")
    parser.add_argument("--data", type=Path, required=True, help="folder with safety/ and routing/")
    parser.add_argument("--out", type=Path, required=True, help="folder of the artefact, whose other heads stay")
    parser.add_argument("--messages", type=Path, help="folder of locales with Postgres' catalogues: /usr/share/locale")
    parser.add_argument("--no-fit", action="store_true", help="only judge")
    arguments = parser.parse_args()
    examples = read_examples(arguments.data)
    code = [text for text in code_of_packages() if len(text) > 500]
    made = [(text, OF_MADE) for text in StrangeForms(code, SEED).texts(FORMS, TONGUES)]
    if arguments.messages is not None:
        made += [(text, OF_MESSAGES) for text in messages_of(arguments.messages, SEED)]
    made += [(piece, OF_FILES) for piece in files_of(Path(__file__).parents[2])]
    rows = fitted_rows(examples)
    texts = [(examples.texts[row][:LONGEST], 1.0) for row in np.flatnonzero(rows)]
    short = rows & (np.array([*map(len, examples.texts)]) < SHORT)
    harm, everyday = (np.flatnonzero(short & (examples.task == task)) for task in ("harm", "everyday"))
    requests = [examples.texts[row] for row in (*np.resize(harm, len(everyday)), *everyday)]
    fitted = fit([*texts, *made], requests, code)
    judged = ~rows & (examples.task != "attack")
    scores = fitted.scores(examples.texts)
    point = float(np.quantile(scores[passing(examples)[2] & judged], 1 - MAY_FLAG))
    print("\n".join(report_lines(examples, scores, point, judged)), flush=True)
    if not arguments.no_fit:
        weights, manifest = arguments.out / WEIGHTS, arguments.out / MANIFEST
        kept, stated = read_artifact(weights, manifest, FORMAT), json.loads(manifest.read_text())
        fitted.arrays["surprise_bias"] = (fitted.arrays["surprise_bias"] - point).astype(np.float32)
        facts = {name: value for name, value in stated.items() if name not in ("format", "sha256")}
        write_artifact(weights, manifest, FORMAT, kept | fitted.arrays, {**facts, "suffixes_seed": SEED})
        print(f"wrote {WEIGHTS} and {MANIFEST} to {arguments.out}")


if __name__ == "__main__":
    main()
