# Plain words: what comments, docstrings, pages and names no longer say, and what they say in its place. A retired
# name is added here once the tree is free of it; public names (CLI, HTTP, YAML, metrics, tables) stay.

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
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
RETIRED_NAMES = {  # as words within an identifier, however it is spelt: `giving_way` is in GivingWay too
    "giving_way": "backpressure",
    "give_way": "yield, preempt, slow_down",
    "speaks_anthropic": "errors_for",
    "taker": "sampler",
    "outlook": "health_snapshot",
    "held_back": "shadow",
    "is_aside": "is_internal",
    "courier": "writer",
    "lane": "concurrency_group",
    "request_table": "device_state",
    "rehearse": "warm_up",
    "rerunner": "eager_rerun",
    "propose_guesses": "propose_drafts",
    "few_rows": "small_batch",
    "lexicon": "vocabulary",
    "yardsticks": "baselines",
    "admin_views": "serializers",
    "team_inputs": "schemas",
    "who_yields": "preempt_for_tier",
    "who_makes_room": "preempt_for_starved",
    "who_gives_way": "preempt_for_memory",
    "is_void": "is_discarded",
    "num_told": "num_on_device",
    "acceptor": "output_processor",
    "distrust": "invalidate",
    "proposer": "draft_source",
    "drafter": "draft_model",
    "fair_line": "fair_queue",
    "held_calls": "call_recovery",
    "unroll": "as_events",
    "somebody": "the thing of the system that does it",
    "whoever": "the thing of the system that does it",
    "send_politely": "send_once",
    "house_report": "admin_report",
    "run_house": "run_stack",
    "set_aside": "cooldown",
    "ability": "capability",
    "ceilings": "hardware_peaks",
    "known_manners": "known_quirks",
    "usual_manners": "usual_quirks",
    "tape": "replay_buffer",
    "services_of": "part_of, edition_of",
}
PUBLIC_NAMES = {  # name as a whole: where it may stand
    "tollgate_keys_set_aside": ("gateway/telemetry/", "tests/"),
    "keys_set_aside": ("gateway/", "tests/"),
    "key_set_aside": ("gateway/upstreams/resilience/keys.py", "tests/"),
    "held_back": (
        "gateway/accounts/team_deletion.py",
        "gateway/config/",
        "gateway/shadow/store.py",
        "gateway/storage/tables.py",
        "tests/",
    ),
    "held_back_created_at_idx": ("gateway/storage/tables.py",),
    "held_back_open_idx": ("gateway/storage/tables.py",),
    "held_back_team_id_created_at_idx": ("gateway/storage/tables.py",),
    "is_aside": (
        "gateway/batch/",
        "gateway/moderation/policy_events.py",
        "gateway/storage/tables.py",
        "migrations/",
        "tests/",
    ),
}
PATTERN = re.compile(rf"\b({'|'.join(RETIRED)})\b", re.IGNORECASE)
QUOTED = re.compile(r"``.*?``|`.*?`|\"[^\"]*\"|\S*[/_]\S*|\S+\.\S+\(")  # names in code, commands, settings, paths


CODE = (*PACKAGES, "tests")


def words_of(name: str) -> str:
    """Return an identifier as words between underscores: GivingWay is _giving_way_."""
    return "_" + re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower().strip("_") + "_"


def identifiers(path: Path) -> set[str]:
    """Return the names in a module, what it is called itself, and each text in it that is one name (a log event)."""
    found = {path.stem}
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.NAME:
            found.add(token.string)
        elif token.type == tokenize.STRING and (text := token.string.strip("\"'")).isidentifier():
            found.add(text)
    return found


def retired_names(name: str, place: str) -> list[str]:
    """Return the retired words within an identifier that stands in a file, unless it is public there."""
    return [] if place.startswith(PUBLIC_NAMES.get(name, ("\0",))) else _retired_in(name)


@cache
def _retired_in(name: str) -> list[str]:
    words = words_of(name)
    return [retired for retired in RETIRED_NAMES if f"_{retired}_" in words]


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
        if path.name not in HISTORY and PATTERN.search(path.read_text())
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


@pytest.mark.parametrize("package", CODE)
def test_names_use_the_words_of_the_field(package: str) -> None:
    """A retired word is found in whatever name it stands, tests' own among them."""
    found = [
        f"{place}: {name}; write: {RETIRED_NAMES[retired]}"
        for path in sorted((ROOT / package).rglob("*.py"))
        if path != Path(__file__)
        if any(map(_retired_in, set(re.findall(r"\w+", path.read_text())))) or _retired_in(path.stem)
        for place in [str(path.relative_to(ROOT))]
        for name in sorted(identifiers(path))
        for retired in retired_names(name, place)
    ]
    assert found == []


def test_the_glossary_says_what_the_code_says() -> None:
    """Each name of the glossary's tables of names stands in the code."""
    tables = (ROOT / "docs" / "glossary.md").read_text().split("## Names in code")[1]
    told = {
        name for cell in re.findall(r"^\| (.*?) \|", tables, re.MULTILINE) for name in re.findall(r"`([\w./]+)`", cell)
    }
    paths = [path for package in CODE for path in (ROOT / package).rglob("*.py") if path != Path(__file__)]
    files = {str(path.relative_to(ROOT)) for path in paths}
    code = set(re.findall(r"\w+", "\n".join(path.read_text() for path in paths)))

    missing = {name for name in told if not set(re.split(r"[./]", name)) <= code}
    assert {name for name in missing if not any(file.endswith(name) for file in files)} == set()


def test_a_retired_name_is_found(tmp_path: Path) -> None:
    """In classes, functions, tests and log events; a public name only where it may stand."""
    module = tmp_path / "lane.py"
    module.write_text(
        'class GivingWay:\n    def test_it_is_held_back(self):\n        log("the_outlook")\nlanes = "a lane"\n'
    )

    found = sorted(word for name in identifiers(module) for word in retired_names(name, "gateway/a.py"))
    assert found == ["giving_way", "held_back", "lane", "outlook"]
    assert retired_names("held_back", "gateway/config/names.py") == []
    assert retired_names("held_back", "router/names.py") == ["held_back"]
