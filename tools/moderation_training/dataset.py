# The texts that the safety classifiers are fitted and judged on, with what is known of each.

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gateway.moderation.classifier.meaning import KINDS
from tools.moderation_training.texts.ordinary import ordinary_prompts
from tools.moderation_training.texts.work import work_texts
from tools.moderation_training.texts.work_judged import judged_texts
from tools.moderation_training.texts.written import written_prompts
from tools.moderation_training.texts.written_injections import written_injections
from tools.moderation_training.texts.written_languages import LANGUAGES, written_languages
from tools.moderation_training.texts.written_moderation import written_to_moderate

# What a text is: an attack on a model, a request for harm, a harmless request that looks like one, an everyday prompt,
# and a text to moderate that breaks OpenAI's content policy or keeps it.
Task = Literal["attack", "harm", "benign", "everyday", "breaks", "keeps"]

COLUMNS = {"S": 0, "H": 1, "HR": 2, "V": 3, "SH": 4, "S3": 5, "H2": 6, "V2": 7}  # of the moderation set, in KINDS
WRITTEN = "written"  # the source of prompts written for this project, beside short everyday ones
WORK = "work"  # the source of everyday text of work that is fitted
TO_MODERATE = "written to moderate"  # the source of such texts
IN_LANGUAGES = tuple(f"written, {language}" for language in LANGUAGES)  # of what was written in others than English
OURS = (WRITTEN, WORK, TO_MODERATE, *IN_LANGUAGES)
JUDGED_WORK = "work, "  # begins the sources of such text that is not
JUDGED_ONLY = ("-NC", "-SA")  # in a licence: rows that no shipped weights may be fitted on
REQUESTS = ("safety_requests_dev", "safety_dev2")  # files
MORE = "safety_more"  # the file that more_sources.py makes, whose sources only the networks of ``harm`` are shown
MORE_SOURCES = ("aart", "safebench", "safety_rbr", "purplellama_interpreter")
EVERYDAY = ("alpaca_harmless", "oasst_first_turn")  # sources of prompts that are harmless and do not look otherwise


class Examples(Struct, frozen=True):
    """Texts and, row for row, what is known of them."""

    texts: list[str]
    task: npt.NDArray[np.str_]
    source: npt.NDArray[np.str_]
    kinds: npt.NDArray[np.float64]  # (rows, len(KINDS)): 1 yes, 0 no, NaN unknown
    may_be_fitted: npt.NDArray[np.bool_]

    @property
    def is_judged(self) -> npt.NDArray[np.bool_]:
        """Which rows nothing is chosen on, though every other row's model is fitted on them: a third, by their text."""
        marks = [sha256(b"judge" + text.encode("utf-8", "replace")).digest() for text in self.texts]
        return np.array([int.from_bytes(mark) % 3 == 0 for mark in marks])

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, chosen: npt.NDArray) -> Examples:
        """Return the rows where ``chosen`` is true, or with these indices."""
        rows = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
        texts = [self.texts[row] for row in rows]
        return Examples(texts, self.task[rows], self.source[rows], self.kinds[rows], self.may_be_fitted[rows])


def read_examples(folder: Path, *, more: bool = False) -> Examples:
    """Read ``safety/`` and ``routing/`` of the data folder: gzipped CSV files, as their names there say. ``more``: the
    file of more_sources.py as well."""
    rows = [*_requests(folder, REQUESTS), *_moderation(folder), *_everyday(folder), *_ours(folder)]
    if more:
        rows += _requests(folder, (MORE,))
    return Examples(
        [row[0] for row in rows],
        np.array([row[1] for row in rows]),
        np.array([row[2] for row in rows]),
        np.array([row[3] for row in rows]),
        np.array([row[4] for row in rows]),
    )


Row = tuple[str, Task, str, list[float], bool]
UNKNOWN = [float("nan")] * len(KINDS)


def _requests(folder: Path, names: tuple[str, ...]) -> Iterator[Row]:
    tasks: dict[str, Task] = {"attack": "attack", "harm": "harm", "benign": "benign"}
    for name in names:
        for row in _read(folder / "safety" / f"{name}.csv.gz"):
            is_free = not any(mark in row["licence"] for mark in JUDGED_ONLY)
            task = "everyday" if row["source"] in EVERYDAY else tasks[row["task"]]
            yield row["text"], task, row["source"], UNKNOWN, is_free


def _moderation(folder: Path) -> Iterator[Row]:
    for row in _read(folder / "safety" / "moderation_dev.csv.gz"):
        kinds = list(UNKNOWN)
        for column, place in COLUMNS.items():
            if row[column]:
                kinds[place] = float(row[column])
        yield row["text"], "breaks" if row["label"] == "1" else "keeps", row["source"], kinds, True


def _everyday(folder: Path) -> Iterator[Row]:
    for row in _read(folder / "routing" / "routing_dev.csv.gz"):
        if row["benchmark"] == "ulab":  # MIT
            yield row["prompt"], "everyday", row["domain"], UNKNOWN, True
    for prompt in ordinary_prompts():
        yield prompt, "everyday", "ordinary", UNKNOWN, True


def _ours(folder: Path) -> Iterator[Row]:
    tasks: dict[str, Task] = {"attack": "attack", "harm": "harm", "everyday": "everyday"}
    for prompt, task in (*written_prompts(), *written_injections()):
        yield prompt, tasks[task], WRITTEN, UNKNOWN, True
    for text, kinds in written_to_moderate():
        yield text, "breaks" if kinds else "keeps", TO_MODERATE, [float(kind in kinds) for kind in KINDS], True
    for prompt, task, language in written_languages():
        yield prompt, tasks[task], f"written, {language}", UNKNOWN, True
    for text, _ in work_texts():
        yield text, "everyday", WORK, UNKNOWN, True
    for text, kind in judged_texts(folder):
        yield text, "everyday", JUDGED_WORK + kind, UNKNOWN, False


def _read(path: Path) -> Iterator[dict[str, str]]:
    csv.field_size_limit(1 << 24)
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)
