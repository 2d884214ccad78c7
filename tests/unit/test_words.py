# Plain words: what comments, docstrings and pages no longer say, and what they say in its place. Names in code follow
# package by package; until then this test reads sentences alone.

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("protocol", "billing", "router", "gateway", "gpu_backend", "tools", "benchmarks")
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
HISTORY = {"CHANGELOG.md", "glossary.md"}  # tell what was; the glossary what it was called
RETIRED = {
    "whoever": "the thing of the system that does it",
    "nobody": "no caller, no process, nothing",
    "somebody": "the thing of the system that does it",
    "someone": "the thing of the system that does it",
    "house": "deployment, stack",
    "houses": "deployments",
    "manners": "quirks",
    "gives way": "yields, is preempted, backpressure",
    "giving way": "backpressure",
}
PATTERN = re.compile(rf"\b({'|'.join(RETIRED)})\b", re.IGNORECASE)
QUOTED = re.compile(r"``.*?``|`.*?`|\"[^\"]*\"|\S*[/_]\S*|\S+\.\S+\(")  # names in code, commands, settings, paths


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments and docstrings of a module, line by line, or the prose lines of a page."""
    source = path.read_text()
    if path.suffix == ".md":
        fenced = False
        for number, line in enumerate(source.splitlines(), 1):
            fenced ^= line.startswith("```")
            if not fenced and not line.startswith("#"):
                yield number, line
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for offset, line in enumerate((ast.get_docstring(node, clean=False) or "").splitlines()):
            yield node.body[0].lineno + offset, line


@pytest.mark.parametrize("package", [*PACKAGES, "pages"])
def test_sentences_use_the_words_of_the_field(package: str) -> None:
    """A retired word is found wherever it stands, and the test says what to write."""
    paths = PAGES if package == "pages" else sorted((ROOT / package).rglob("*.py"))
    found = [
        f"{path.relative_to(ROOT)}:{number}: {word.group()}; write: {RETIRED[word.group().lower()]}"
        for path in paths
        if path.name not in HISTORY
        for number, line in sentences(path)
        for word in PATTERN.finditer(QUOTED.sub("", line))
    ]
    assert found == []


def test_a_retired_word_is_found(tmp_path: Path) -> None:
    """In comments, in docstrings and on pages; not in names and quotations."""
    module = tmp_path / "a.py"
    module.write_text('"""Somebody does."""\nhouse = 1  # the house\ndef f():\n    """Calls `house`."""\n')
    page = tmp_path / "a.md"
    page.write_text("# The house\n\nOur house.\n\n```\nhouse\n```\n")

    read = [
        (path.suffix, n)
        for path in (module, page)
        for n, line in sentences(path)
        if PATTERN.search(QUOTED.sub("", line))
    ]
    assert sorted(read) == [(".md", 3), (".py", 1), (".py", 2)]
