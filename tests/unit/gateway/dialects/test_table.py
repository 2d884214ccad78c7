# What an inference endpoint is stands in the table alone: no other file of the gateway tells endpoints apart.

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from gateway.dialects.table import BY_NAME, ENDPOINTS, FOR_BATCHES
from protocol.inference import Request

ROOT = Path(__file__).parents[4]
READERS = [path for folder in ("http", "batch") for path in sorted((ROOT / "gateway" / folder).rglob("*.py"))]
# A dialect's own files, and those that speak to upstreams, whose paths are the same; the demo's greeting is an example.
SPEAKERS = ("gateway/dialects/", "gateway/upstreams/", "gateway/dev/", "gateway/remote/")
KINDS = {kind.__name__ for kind in (*get_args(Request), *(endpoint.body_type for endpoint in ENDPOINTS))}


def names_in(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def choices_by_kind(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what chooses by the type of a request: an isinstance outside an assert, or a case of a match."""
    asserted = {each for node in ast.walk(tree) if isinstance(node, ast.Assert) for each in ast.walk(node)}
    for node in ast.walk(tree):
        is_question = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
        if (is_question and node not in asserted and names_in(node) & KINDS) or (
            isinstance(node, ast.MatchClass) and names_in(node.cls) & KINDS
        ):
            yield node


@pytest.mark.parametrize("path", READERS, ids=lambda path: path.relative_to(ROOT / "gateway").as_posix())
def test_no_reader_of_the_table_chooses_by_the_type_of_a_request(path: Path) -> None:
    """What differs between endpoints is a field of their rows."""
    assert [node.lineno for node in choices_by_kind(ast.parse(path.read_text()))] == []


def test_no_other_file_names_the_path_of_an_endpoint() -> None:
    """Not to compare with it, not to look for its beginning."""
    paths = {endpoint.path for endpoint in ENDPOINTS}
    wrong = []
    for path in sorted((ROOT / "gateway").rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        if place.startswith(SPEAKERS):
            continue
        texts = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        wrong += [f"{place}:{node.lineno} {node.value}" for node in texts if node.value in paths]

    assert wrong == []


def test_rows_are_told_apart_by_path_and_by_name() -> None:
    """Two rows of one path or one name would hide each other."""
    assert len({endpoint.path for endpoint in ENDPOINTS}) == len(BY_NAME) == len(ENDPOINTS)
    assert FOR_BATCHES.keys() == {
        *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank"),
        *("/v1/messages", "/v1/responses"),
    }


def test_no_other_file_looks_how_a_path_begins() -> None:
    """What lies below an endpoint is asked of the table: ``errors_at``."""
    wrong = []
    for path in sorted((ROOT / "gateway").rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(r"""startswith\(["']/v1|[=!]= ["']/v1""", line):
                wrong.append(f"{path.relative_to(ROOT)}:{number} {line.strip()}")

    assert wrong == []
