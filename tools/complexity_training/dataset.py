# The outcomes that the complexity model is fitted on: prompts with the scores of a strong and a weak model.

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from scipy.sparse import csr_matrix, vstack  # type: ignore[import-untyped]

from router.complexity.features import BUCKETS, bounded, read_text
from tools.complexity_training.written import written_prompts

# The labels of this subject are broken upstream: the strong model is marked right on 2 % of it.
BROKEN_SUBJECT = "high_school_mathematics"
MAIN_PAIR = "gpt-4-1106-preview"  # the strong model of the pair that has most rows of each subject
BELIEVED = "believed"  # stands for the models where no model was asked


class Outcomes(Struct, frozen=True):
    """Prompts and, row for row, where they come from and how two models did, 0..1."""

    prompts: list[str]
    benchmark: npt.NDArray[np.str_]
    domain: npt.NDArray[np.str_]
    strong: npt.NDArray[np.float64]
    weak: npt.NDArray[np.float64]
    pair: npt.NDArray[np.str_]  # names of both models
    counts: csr_matrix  # (rows, buckets), words and pairs of words as serving counts them
    stats: npt.NDArray[np.float64]  # (rows, text statistics)
    readable: npt.NDArray[np.float64]  # 0..1, the share of words that serving looks up

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
            self.pair[rows],
            self.counts[rows],
            self.stats[rows],
            self.readable[rows],
        )

    def __add__(self, other: Outcomes) -> Outcomes:
        """Return these rows and then the others."""
        return Outcomes(
            self.prompts + other.prompts,
            np.concatenate([self.benchmark, other.benchmark]),
            np.concatenate([self.domain, other.domain]),
            np.concatenate([self.strong, other.strong]),
            np.concatenate([self.weak, other.weak]),
            np.concatenate([self.pair, other.pair]),
            vstack([self.counts, other.counts]).tocsr(),
            np.vstack([self.stats, other.stats]),
            np.concatenate([self.readable, other.readable]),
        )

    @property
    def suffices(self) -> npt.NDArray[np.bool_]:
        """Whether the weak model did as well as the strong one."""
        return self.weak >= self.strong

    @property
    def gain(self) -> npt.NDArray[np.float64]:
        """By how much the strong model did better."""
        return self.strong - self.weak

    @property
    def is_main_pair(self) -> npt.NDArray[np.bool_]:
        """Whether a row tells of the main pair of models."""
        return np.char.startswith(self.pair, MAIN_PAIR)

    @property
    def is_believed(self) -> npt.NDArray[np.bool_]:
        """Whether a row is no outcome, but what is believed of a written prompt."""
        return self.pair == BELIEVED

    @property
    def is_sound(self) -> npt.NDArray[np.bool_]:
        """Whether a row's labels can be believed."""
        return self.domain != BROKEN_SUBJECT


def outcomes_of(
    prompts: list[str],
    benchmark: npt.NDArray[np.str_],
    domain: npt.NDArray[np.str_],
    strong: npt.NDArray[np.float64],
    weak: npt.NDArray[np.float64],
    pair: npt.NDArray[np.str_],
) -> Outcomes:
    """Return the outcomes with what the model reads of each prompt."""
    return Outcomes(prompts, benchmark, domain, strong, weak, pair, *features_of(prompts))


def features_of(prompts: list[str]) -> tuple[csr_matrix, npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return hashed word counts (rows, buckets), text statistics (rows, statistics) and what share of words counts, as
    serving computes them."""
    readings = [read_text(bounded(prompt)) for prompt in prompts]
    starts = np.cumsum([0, *(len(reading.buckets) for reading in readings)])
    buckets = np.concatenate([reading.buckets for reading in readings])
    counts = csr_matrix((np.ones(len(buckets)), buckets, starts), shape=(len(prompts), BUCKETS))
    counts.sum_duplicates()
    return counts, np.array([reading.stats for reading in readings]), np.array([each.readable for each in readings])


def read_outcomes(path: Path) -> Outcomes:
    """Read a gzipped CSV with columns benchmark, domain, prompt, strong_score, weak_score, strong_model, weak_model."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return outcomes_of(
        [row["prompt"] for row in rows],
        np.array([row["benchmark"] for row in rows]),
        np.array([row["domain"] for row in rows]),
        np.array([float(row["strong_score"]) for row in rows]),
        np.array([float(row["weak_score"]) for row in rows]),
        np.array([f"{row['strong_model']} and {row['weak_model']}" for row in rows]),
    )


def believed_outcomes() -> Outcomes:
    """Return what is believed of written prompts: the strong model is right, the weak one as often as ``Kind`` says."""
    prompts = list(written_prompts())
    return outcomes_of(
        [prompt.text for prompt in prompts],
        np.full(len(prompts), BELIEVED),
        np.array([prompt.kind for prompt in prompts]),
        np.ones(len(prompts)),
        np.array([float(prompt.suffices) for prompt in prompts]),
        np.full(len(prompts), BELIEVED),
    )
