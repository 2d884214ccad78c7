# Networks that read what the words of a text mean: vectors of words that others made (GloVe, Pennington 2014), pooled,
# and scikit-learn's perceptron with one hidden layer. For serving its first layer is multiplied into the vectors.

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from scipy.sparse import csr_matrix, diags  # type: ignore[import-untyped]
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

from gateway.safety.features import hashes_of, words_in
from gateway.safety.meaning import MEANT, MEANT_AT_LEAST

MOST_WORDS = 80_000  # the most frequent, of those that are one word as the classifiers read
ROUNDS = 20  # over all texts
FINE = 3.0  # steps in a standard deviation of what a hidden unit makes of words

Floats = npt.NDArray[np.float64]


class Recipe(NamedTuple):
    """How the networks of a head are fitted."""

    hidden: int  # units of each
    nets: int  # whose mean counts
    alpha: float  # of scikit-learn: the penalty of large weights
    counts: float  # times what the networks say, beside what words or runs of bytes say


RECIPES = {"harm": Recipe(16, 1, 0.3, 0.4), "any": Recipe(8, 2, 1.0, 0.5)}


class Vectors(Struct, frozen=True):
    """Vectors of words, each of length 1."""

    hashes: npt.NDArray[np.uint32]  # (words,), rising, each once
    rows: npt.NDArray[np.float32]  # (words, dimensions)

    def pooled(self, lexicon: list[bytes], spoken: csr_matrix, rows: npt.NDArray) -> Floats:
        """Return (texts, columns): the mean of ``rows`` (words, columns) of the words that each text of ``spoken``
        (texts, lexicon) says, among some that mean nothing."""
        hashes = hashes_of(lexicon)
        places = np.searchsorted(self.hashes, hashes).clip(max=len(self.hashes) - 1)
        known = spoken @ diags((self.hashes[places] == hashes).astype(np.float64))
        count = np.asarray(known.sum(axis=1)).ravel()
        mean: Floats = (known @ rows[places]) / (count + MEANT_AT_LEAST)[:, None]
        return mean


class Nets(NamedTuple):
    """The networks of one head, side by side, reading vectors as they come."""

    into: Floats  # (dimensions, hidden)
    bias: Floats  # (hidden,)
    out: Floats  # (hidden,)
    at: float


def read_vectors(path: Path) -> Vectors:
    """Read vectors of words, the most frequent first: GloVe's text (a word and its numbers a line), or the arrays
    ``words`` and ``vectors`` of an .npz."""
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            words, numbers = [word.encode() for word in arrays["words"].tolist()], arrays["vectors"]
        kept = [row for row, word in enumerate(words) if words_in(word) == [word]][:MOST_WORDS]
        said, rows = [words[row] for row in kept], numbers[kept].astype(np.float32)
    else:
        said, lines = [], []
        with path.open("rb") as file:
            for line in file:
                word, _, rest = line.partition(b" ")
                if words_in(word) == [word] and len(said) < MOST_WORDS:
                    said.append(word)
                    lines.append(np.array(rest.split(), np.float32))
        rows = np.array(lines)
    hashes, first = np.unique(hashes_of(said), return_index=True)
    rows = rows[first]
    return Vectors(hashes, rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-6))


def fit_nets(pooled: Floats, wanted: npt.NDArray[np.bool_], weight: Floats, name: str, seed: int) -> Nets:
    """Fit the networks of a head on pooled vectors, each text with its weight."""
    recipe = RECIPES[name]
    middle = pooled.mean(axis=0)
    spread = float((pooled - middle).std())
    fitted = []
    for number in range(recipe.nets):
        net = MLPClassifier(
            (recipe.hidden,),
            alpha=recipe.alpha,
            max_iter=ROUNDS,
            batch_size=min(128, len(pooled)),
            learning_rate_init=0.002,
            random_state=seed + number,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # it stops after ROUNDS
            fitted.append(net.fit((pooled - middle) / spread, wanted, sample_weight=weight))
    into = np.hstack([net.coefs_[0] for net in fitted]) / spread
    bias = np.concatenate([net.intercepts_[0] for net in fitted]) - middle @ into
    share = recipe.counts / recipe.nets
    out = share * np.concatenate([net.coefs_[1][:, 0] for net in fitted])
    return Nets(into, bias, out, share * sum(float(net.intercepts_[1][0]) for net in fitted))


class Folded(NamedTuple):
    """The networks of some heads side by side, their first layers multiplied into the vectors, in whole steps."""

    rows: npt.NDArray[np.int8]  # (words, hidden)
    steps: npt.NDArray[np.float32]  # (hidden,)
    bias: npt.NDArray[np.float32]  # (hidden,)
    out: npt.NDArray[np.float32]  # (hidden, heads that are MEANT)


def folded(vectors: Vectors, nets: dict[str, Nets]) -> Folded:
    """Return what serving needs of networks; of heads that have none, nothing."""
    size = sum(len(one.out) for one in nets.values())
    into, bias, out = np.zeros((vectors.rows.shape[1], size)), np.zeros(size), np.zeros((size, len(MEANT)))
    start = 0
    for name, one in nets.items():
        end = start + len(one.out)
        into[:, start:end], bias[start:end], out[start:end, MEANT.index(name)] = one.into, one.bias, one.out
        start = end
    projected = vectors.rows @ into
    steps = np.maximum(projected.std(axis=0) / FINE, 1e-9)
    rows = np.rint(projected / steps).clip(-127, 127).astype(np.int8)
    return Folded(rows, steps.astype(np.float32), bias.astype(np.float32), out.astype(np.float32))
