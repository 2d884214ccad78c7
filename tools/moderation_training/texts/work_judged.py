# Everyday text of work that judges the classifiers and is never fitted: modules of the standard library outside the
# packages that are fitted, logs and tables of other forms, JSON schemas, and sentences about made-up persons.

from __future__ import annotations

import gzip
import json
import os
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path

SEED = 5
MODULES, PER_MODULE = 60, 4  # pieces of code
PIECE = 4000  # characters
EACH = 60  # logs and tables
SCHEMAS = 200


def judged_texts(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each text with its kind, from the Python that runs and the data folder."""
    dice = random.Random(SEED)
    modules = sorted(Path(os.__file__).parent.glob("*.py"))
    dice.shuffle(modules)
    for path in modules[:MODULES]:
        text = path.read_text(errors="replace")
        for start in range(0, min(len(text), PER_MODULE * PIECE), PIECE):
            yield text[start : start + PIECE], "code"
    for _ in range(EACH):
        yield "\n".join(",".join(str(dice.randint(0, 999)) for _ in range(8)) for _ in range(60)), "tables"
    for _ in range(EACH):
        yield "\n".join(_line(dice) for _ in range(50)), "logs"
    with tarfile.open(folder / "structured" / "json-schema-test-suite.tar.xz") as archive:
        names = sorted(name for name in archive.getnames() if name.endswith(".json"))
        for name in dice.sample(names, min(SCHEMAS, len(names))):
            if (file := archive.extractfile(name)) is not None:
                yield file.read().decode("utf-8")[:PIECE], "JSON"
    with gzip.open(folder / "safety" / "pii_dev.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["full_text"], "sentences with names and addresses"


def _line(dice: random.Random) -> str:
    return (
        f"2026-11-21 12:{dice.randint(0, 59):02d} INFO worker {dice.randint(1, 9)} request {dice.randint(1, 9999)} "
        f"status 200 took {dice.random():.3f} s"
    )
