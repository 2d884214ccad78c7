# What the words of a text mean, as far as the company they keep tells: vectors of words, pooled, and small networks
# that read them. A word that no training text has said is known by its neighbours.

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# The heads that add what the networks say, in the order of ``classifier.HEADS``.
KINDS = (
    *("sexual", "hate", "harassment", "violence", "self-harm", "sexual/minors", "hate/threatening", "violence/graphic"),
)
MEANT = ("any", *KINDS)
MEANT_AT_LEAST = 5.0  # words added to a text's, that mean nothing: of a few words nothing is certain

Floats = npt.NDArray[np.float32]


class Meaning:
    """The words that have a vector, projected for the hidden units of all networks, and what these make of them."""

    def __init__(self, weights: dict[str, npt.NDArray]) -> None:
        self._hashes = weights["meant_words"].cumsum(dtype=np.uint32)  # (words,), rising
        words, hidden = weights["meant_rows"].shape
        # Whole numbers of a step, and 1, by which words are counted; the last row is of words without a vector.
        self._rows = np.zeros((words + 1, hidden + 1), np.int8)
        self._rows[:-1, :-1], self._rows[:, -1] = weights["meant_rows"], 1
        self._steps = np.append(weights["meant_steps"], np.float32(1))
        # A hidden unit is 0 or what the words come to divided by how many they are, its bias added: the same as when
        # every word brings the bias along, and what is left above 0 is divided in the end.
        self._bias = np.append(weights["hidden_bias"], np.float32(0))
        self._said = np.vstack((weights["hidden_said"], np.zeros(len(MEANT), np.float32)))

    def places_of(self, hashes: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
        """Return the place of each word here; those without a vector share one, and mean nothing."""
        places = self._hashes.searchsorted(hashes)
        is_other = self._hashes.take(places, mode="clip") != hashes
        np.putmask(places, is_other, len(self._hashes))
        return places

    def logits(self, places: npt.NDArray[np.int32], often: Floats) -> list[float]:
        """Return what a text's words add to each head that is ``MEANT``; ``often``: how much each word counts."""
        hidden = often.dot(self._rows.take(places, axis=0).astype(np.float32))
        hidden *= self._steps
        count = float(hidden[-1]) + MEANT_AT_LEAST
        hidden += self._bias * np.float32(count)
        np.maximum(hidden, 0, out=hidden)
        hidden /= np.float32(count)
        said: list[float] = hidden.dot(self._said).tolist()
        return said
