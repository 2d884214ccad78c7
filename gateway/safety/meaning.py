# What the words of a text mean, as far as the company they keep tells: vectors of words, pooled, and small networks
# that read them. A word that no training text has said is known by its neighbours.

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# The heads that add what the networks say, in the order of ``classifier.HEADS``.
KINDS = (
    *("sexual", "hate", "harassment", "violence", "self-harm", "sexual/minors", "hate/threatening", "violence/graphic"),
)
MEANT = ("harm", "any", *KINDS)
MEANT_AT_LEAST = 5.0  # words added to a text's, that mean nothing: of a few words nothing is certain

Floats = npt.NDArray[np.float32]


class Meaning:
    """The words that have a vector, projected for the hidden units of all networks, and what these make of them."""

    def __init__(self, weights: dict[str, npt.NDArray]) -> None:
        self._hashes = weights["meant_words"].cumsum(dtype=np.uint32)  # (words,), rising
        self._rows = weights["meant_rows"]  # (words, hidden), whole numbers of a step
        self._steps = weights["meant_steps"]  # (hidden,)
        # A hidden unit is 0 or what the words come to divided by how many they are, its bias added: the same as when
        # every word brings the bias along, and what is left above 0 is divided in the end.
        self._bias = np.append(weights["hidden_bias"], np.float32(1))
        self._at_least = self._bias * np.float32(MEANT_AT_LEAST)
        self._said = np.vstack((weights["hidden_said"], np.zeros(len(MEANT), np.float32)))
        self.columns = len(self._bias)

    def rows_of(self, hashes: npt.NDArray[np.uint32]) -> Floats:
        """Return (words, columns): what each word adds to the hidden units, and 1; a word without a vector means
        nothing, and adds the bias alone."""
        places = self._hashes.searchsorted(hashes)
        meant = (self._hashes.take(places, mode="clip") == hashes).nonzero()[0]
        rows = np.tile(self._bias, (len(hashes), 1))
        rows[meant, :-1] += self._rows.take(places[meant], axis=0) * self._steps
        return rows

    def logits(self, sums: Floats) -> list[float]:
        """Return what the rows of a text's words, summed up, add to each head that is ``MEANT``."""
        hidden = sums + self._at_least
        np.maximum(hidden, 0, out=hidden)
        scale = 1 / float(hidden[-1])
        return [scale * said for said in hidden.dot(self._said).tolist()]
