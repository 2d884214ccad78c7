# Networks that read what the words of a text mean: vectors of words that others made (GloVe, Pennington 2014, and those
# of spaCy's pipelines), concatenated and pooled, and scikit-learn's perceptron with one hidden layer. For serving its
# first layer is multiplied into the vectors.

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from scipy.sparse import csr_matrix  # type: ignore[import-untyped]
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

from gateway.moderation.classifier.features import hashes_of, is_word
from gateway.moderation.classifier.meaning import KINDS, MEANT, MEANT_AT_LEAST

MOST_WORDS = 90_000  # that are served: those that say most
ROUNDS = 20  # over all texts
FINE = 3.0  # steps in a standard deviation of what a hidden unit makes of words

Floats = npt.NDArray[np.float64]


class Recipe(NamedTuple):
    """How the network of a head is fitted."""

    hidden: int  # units
    alpha: float  # of scikit-learn: the penalty of large weights
    counts: float  # times what the network says, beside what words or runs of bytes say


RECIPES = {"any": Recipe(16, 2.0, 0.7), "kinds": Recipe(16, 1.0, 1.0)}


class Vectors(Struct, frozen=True):
    """Vectors of words, concatenated, each of length 1, or 0 where one has none."""

    hashes: npt.NDArray[np.uint32]  # (words,), rising, each once
    rows: npt.NDArray[np.float32]  # (words, dimensions)

    def pooled(self, vocabulary: list[bytes], spoken: csr_matrix) -> Floats:
        """Return (texts, dimensions): the mean vector of the words that each text of ``spoken`` (texts, vocabulary)
        says, among some that mean nothing, as words without a vector do."""
        return pooled(self.hashes, self.rows, vocabulary, spoken)


class Nets(NamedTuple):
    """The network of one head, or of all kinds, reading vectors as they come."""

    into: Floats  # (dimensions, hidden)
    bias: Floats  # (hidden,)
    out: Floats  # (hidden, heads)
    at: Floats  # (heads,)


def read_vectors(paths: list[Path]) -> Vectors:
    """Read vectors of words, each file's beside those of the files before: a word and its numbers a line (GloVe's
    text), or the arrays ``words`` and ``vectors`` of an .npz."""
    read = [_read(path) for path in paths]
    hashes = np.unique(np.concatenate([hashes for hashes, _ in read]))
    rows = np.zeros((len(hashes), sum(vectors.shape[1] for _, vectors in read)), np.float32)
    start = 0
    for said, vectors in read:
        end = start + vectors.shape[1]
        rows[np.searchsorted(hashes, said), start:end] = vectors
        start = end
    return Vectors(hashes, rows)


def _read(path: Path) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            words, numbers = [word.encode() for word in arrays["words"].tolist()], arrays["vectors"]
    else:
        lines = [line.split() for line in path.read_bytes().splitlines()]
        words, numbers = [line[0] for line in lines], np.array([line[1:] for line in lines], np.float32)
    kept = [row for row, word in enumerate(words) if is_word(word)]
    hashes, first = np.unique(hashes_of([words[row] for row in kept]), return_index=True)
    rows = numbers[np.array(kept)[first]].astype(np.float32)
    return hashes, rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-6)


def pooled(hashes: npt.NDArray[np.uint32], rows: npt.NDArray, vocabulary: list[bytes], spoken: csr_matrix) -> Floats:
    """Return (texts, columns): the mean of ``rows`` (words, columns), 0 for a word that is not among ``hashes``."""
    asked = hashes_of(vocabulary)
    places = np.searchsorted(hashes, asked).clip(max=len(hashes) - 1)
    known = np.where((hashes[places] == asked)[:, None], rows[places], 0)
    mean: Floats = (spoken @ known) / (np.asarray(spoken.sum(axis=1)) + MEANT_AT_LEAST)
    return mean


def fit_nets(mean: Floats, wanted: npt.NDArray[np.bool_], weight: Floats, name: str, seed: int) -> Nets:
    """Fit the network of a head on pooled vectors, each with its weight; ``wanted``: (texts,) or (texts, heads)."""
    recipe = RECIPES[name]
    middle = mean.mean(axis=0)
    spread = float((mean - middle).std())
    net = MLPClassifier(
        (recipe.hidden,),
        alpha=recipe.alpha,
        max_iter=ROUNDS,
        batch_size=min(128, len(mean)),
        learning_rate_init=0.002,
        random_state=seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # it stops after ROUNDS
        net.fit((mean - middle) / spread, wanted, sample_weight=weight)
    into = net.coefs_[0] / spread
    bias = net.intercepts_[0] - middle @ into
    return Nets(into, bias, recipe.counts * net.coefs_[1], recipe.counts * net.intercepts_[1])


class Folded(NamedTuple):
    """The networks of some heads, concatenated, their first layers multiplied into the vectors, in whole steps."""

    hashes: npt.NDArray[np.uint32]  # (words,), rising
    rows: npt.NDArray[np.int8]  # (words, hidden)
    steps: npt.NDArray[np.float32]  # (hidden,)
    bias: npt.NDArray[np.float32]  # (hidden,)
    out: npt.NDArray[np.float32]  # (hidden, heads that are MEANT)


def folded(vectors: Vectors, nets: dict[str, Nets]) -> Folded:
    """Return what serving needs of networks; of heads that have none, nothing. A word is dropped when others move every
    unit more: what is left of it is that it was said."""
    size = sum(len(one.bias) for one in nets.values())
    into, bias, out = np.zeros((vectors.rows.shape[1], size)), np.zeros(size), np.zeros((size, len(MEANT)))
    start = 0
    for name, one in nets.items():
        end = start + len(one.bias)
        heads = [MEANT.index(head) for head in (KINDS if name == "kinds" else (name,))]
        into[:, start:end], bias[start:end], out[start:end, heads] = one.into, one.bias, one.out
        start = end
    projected = vectors.rows @ into.astype(np.float32)
    steps = np.maximum(projected.std(axis=0) / FINE, 1e-9)
    moved = np.abs(projected / steps).max(axis=1, initial=0)
    kept = np.sort(np.argsort(-moved, kind="stable")[:MOST_WORDS])
    rows = np.rint(projected[kept] / steps).clip(-127, 127).astype(np.int8)
    return Folded(vectors.hashes[kept], rows, steps.astype(np.float32), bias.astype(np.float32), out.astype(np.float32))
