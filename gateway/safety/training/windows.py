# What the classifiers read of the windows of many texts, counted once for all the models that are fitted on them.

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from scipy.sparse import csr_matrix  # type: ignore[import-untyped]

from gateway.safety.classifier import readings
from gateway.safety.features import BUCKETS, RUN_BUCKETS, Reading, read_runs, read_words


class Windows(Struct, frozen=True):
    """The windows of some texts, in order."""

    texts: int
    owner: npt.NDArray[np.int64]  # (windows,): whose each is
    words: csr_matrix  # (windows, buckets): counts
    runs: csr_matrix  # (windows, run buckets)

    def take(self, texts: npt.NDArray[np.int64]) -> Windows:
        """Return the windows of these texts alone; their numbers rise."""
        kept = np.flatnonzero(np.isin(self.owner, texts))
        return Windows(len(texts), np.searchsorted(texts, self.owner[kept]), self.words[kept], self.runs[kept])

    def first(self, most: int) -> Windows:
        """Return the first windows of each text, at most ``most`` of each."""
        place = np.arange(len(self.owner)) - np.searchsorted(self.owner, self.owner)
        kept = np.flatnonzero(place < most)
        return Windows(self.texts, self.owner[kept], self.words[kept], self.runs[kept])


def windows_of(texts: list[str]) -> Windows:
    """Read all windows of texts."""
    found = [readings(text) for text in texts]
    windows = [window for some in found for window in some]
    owner = np.repeat(np.arange(len(texts)), list(map(len, found)))
    return Windows(len(texts), owner, _counts(windows, read_words, BUCKETS), _counts(windows, read_runs, RUN_BUCKETS))


def _counts(windows: list[str], read: Callable[[str], Reading], buckets: int) -> csr_matrix:
    found = [read(window) for window in windows]
    starts = np.cumsum([0, *(len(reading.buckets) for reading in found)])
    columns = np.concatenate([reading.buckets for reading in found])
    counts = np.concatenate([reading.counts for reading in found]).astype(np.float64)
    return csr_matrix((counts, columns, starts), shape=(len(windows), buckets))
