# How often the classifiers flag harmless answers, in the windows in which answers are watched. Nothing of this
# was fitted on: docstrings of Python, the documentation of this project, and sentences about made-up persons.
#   python -m tools.moderation_training.answers --data DATA

from __future__ import annotations

import argparse
import gzip
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from gateway.moderation.classifier.classifier import Classifier, evened, findings_of
from gateway.moderation.classifier.features import passages
from gateway.moderation.classifier.plain import plain
from gateway.moderation.output_watch import JUDGED
from tools.moderation_training.evaluate import wilson

LEAST, MOST = 200, 2000  # characters of an answer
MODULES = (
    *("argparse", "ast", "asyncio", "base64", "bisect", "calendar", "cmd", "codecs", "collections", "configparser"),
    *("contextlib", "copy", "csv", "datetime", "decimal", "difflib", "dis", "doctest", "email", "enum", "fileinput"),
    *("fractions", "functools", "glob", "gzip", "hashlib", "heapq", "html", "http.client", "imaplib", "inspect", "io"),
    *("itertools", "json", "locale", "logging", "mailbox", "math", "mimetypes", "multiprocessing", "operator", "os"),
    *("pathlib", "pdb", "pickle", "pprint", "profile", "queue", "random", "re", "sched", "shelve", "shlex", "shutil"),
    *("signal", "smtplib", "socket", "sqlite3", "ssl", "statistics", "string", "struct", "subprocess", "tarfile"),
    *("tempfile", "textwrap", "threading", "time", "timeit", "tokenize", "traceback", "types", "typing", "unittest"),
    *("unittest.mock", "urllib.parse", "uuid", "venv", "warnings", "weakref", "xml.dom.minidom", "zipfile"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the answers that are flagged though they harm nobody.")
    parser.add_argument("--data", type=Path, required=True, help="folder with safety/")
    arguments = parser.parse_args()
    classifier = Classifier.load()
    collections = {
        "docstrings of Python": docstrings(),
        "documentation of this project": documentation(Path(__file__).parents[2] / "docs"),
        "sentences of presidio-research, ten each": sentences(arguments.data / "safety" / "pii_dev.jsonl.gz"),
    }
    print("| answers | count | flagged [95 %] | windows | flagged |", "|---|---|---|---|---|", sep="\n")
    for name, texts in collections.items():
        looks = [[is_flagged(classifier, window) for window in passages(text)] for text in texts]
        found = np.array([any(look) for look in looks])
        windows = np.array([one for look in looks for one in look])
        low, high = wilson(found)
        shares = f"{found.mean():.4f} [{low:.4f}, {high:.4f}]"
        print(f"| {name} | {len(found)} | {shares} | {len(windows)} | {windows.mean():.4f} |", flush=True)


def is_flagged(classifier: Classifier, window: str) -> bool:
    """Whether the watch of answers would find something by the classifiers."""
    return bool(findings_of(classifier.logits(evened(plain(window).lower())), JUDGED))


def docstrings() -> list[str]:
    """Return what the library says of its modules, classes and functions."""
    found: dict[str, None] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        members = [each for _, each in inspect.getmembers(module) if inspect.isroutine(each) or inspect.isclass(each)]
        for thing in (module, *members):
            found[(inspect.getdoc(thing) or "")[:MOST]] = None
    return [text for text in found if len(text) >= LEAST]


def documentation(folder: Path) -> list[str]:
    """Return the sections of Tollgate's documentation."""
    sections = [text for path in sorted(folder.glob("*.md")) for text in path.read_text().split("\n## ")]
    return [text[:MOST] for text in sections if len(text) >= LEAST]


def sentences(path: Path) -> list[str]:
    """Return sentences with made-up names and numbers, ten to an answer."""
    lines = list(_texts(path))
    return [" ".join(lines[start : start + 10])[:MOST] for start in range(0, len(lines), 10)]


def _texts(path: Path) -> Iterator[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield msgspec.json.decode(line)["full_text"]


if __name__ == "__main__":
    main()
