# The outcomes that the complexity model is fitted on: prompts with the scores of a strong and a weak model.

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import numpy.typing as npt
from msgspec import Struct

# The labels of this subject are broken upstream: the strong model is marked right on 2 % of it.
BROKEN_SUBJECT = "high_school_mathematics"


class Outcomes(Struct, frozen=True):
    """Prompts and, row for row, where they come from and how two models did, 0..1."""

    prompts: list[str]
    benchmark: npt.NDArray[np.str_]
    domain: npt.NDArray[np.str_]
    strong: npt.NDArray[np.float64]
    weak: npt.NDArray[np.float64]
    strong_model: npt.NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, chosen: npt.NDArray) -> Outcomes:
        """Return the rows where ``chosen`` is true, or with these indices."""
        rows = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
        return Outcomes(
            [self.prompts[row] for row in rows],
            self.benchmark[rows],
            self.domain[rows],
            self.strong[rows],
            self.weak[rows],
            self.strong_model[rows],
        )

    @property
    def suffices(self) -> npt.NDArray[np.bool_]:
        """Whether the weak model did as well as the strong one."""
        return self.weak >= self.strong


def read_outcomes(path: Path) -> Outcomes:
    """Read a gzipped CSV with columns benchmark, domain, prompt, strong_score, weak_score, strong_model."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return Outcomes(
        [row["prompt"] for row in rows],
        np.array([row["benchmark"] for row in rows]),
        np.array([row["domain"] for row in rows]),
        np.array([float(row["strong_score"]) for row in rows]),
        np.array([float(row["weak_score"]) for row in rows]),
        np.array([row["strong_model"] for row in rows]),
    )
