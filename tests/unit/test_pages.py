# Pages lead where they say (every link, every experiment from its index) and begin with who they are for.

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import billing.core.errors
import gateway.core.errors
import gateway.upstreams.wire.errors
import protocol.errors
import router.catalog.errors
from gateway.reports.advice import ADVICE
from protocol.errors import ServiceError

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "docs" / "experiments"
FOLDERS = ("docs", "router", "gateway", "gpu_backend")
TREE = ("protocol", "billing", "router", "gateway", "gpu_backend", "tools", "benchmarks", "migrations", "tests")
PAGES = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
OF = (protocol.errors, billing.core.errors, router.catalog.errors, gateway.core.errors, gateway.upstreams.wire.errors)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(#[^)\s]*)?\)")


def anchors(page: Path) -> set[str]:
    """Return what may stand behind `#` in a link to a page, as GitHub makes it of headings."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found[anchor] = found.get(anchor, -1) + 1
    return {f"{name}-{n}" if n else name for name, last in found.items() for n in range(last + 1)}


def broken_links(page: Path) -> list[str]:
    """Return the links of a page that lead to no file, or to no heading of it."""
    broken = []
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for path, anchor in LINK.findall(prose):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor[1:] not in anchors(target)):
            broken.append(path + anchor)
    return broken


def _code() -> list[Path]:
    paths = [path for folder in TREE for path in (ROOT / folder).rglob("*.*")]
    return [path for path in paths if path.suffix in (".py", ".lua", ".sql")]


def test_links_of_pages_lead_somewhere() -> None:
    """A file that moves, or a heading that is renamed, takes the links to it along."""
    broken = {str(page.relative_to(ROOT)): found for page in PAGES if (found := broken_links(page))}
    assert broken == {}


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    """A missing file and a missing heading are told apart from those that are there."""
    (tmp_path / "a.md").write_text("# A\n\n## What `x` costs\n")
    page = tmp_path / "b.md"
    page.write_text("[1](a.md) [2](a.md#what-x-costs) [3](a.md#gone) [4](gone.md) [5](https://example.com/gone.md)\n")

    assert broken_links(page) == ["a.md#gone", "gone.md"]


def test_no_page_holds_both_sides_of_a_merge() -> None:
    """A merge that stopped and was committed all the same shows its marks to every reader."""
    marks = re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE)

    assert [str(page) for page in PAGES if marks.search(page.read_text())] == []


def test_files_that_pages_name_exist() -> None:
    """A test or module that moves takes its mentions along; experiments and the changelog tell of what was."""
    files = [str(path.relative_to(ROOT)) for path in _code() if path.suffix == ".py"]
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        if page.name not in ("CHANGELOG.md", "glossary.md") and EXPERIMENTS not in page.parents
        for name in re.findall(r"`([\w/]+\.py)(?:::\w+)?`", page.read_text())
        if not any(f"/{file}".endswith(f"/{name}") for file in files)
    ]
    assert missing == []


def test_names_of_the_architecture_are_in_the_code() -> None:
    """A class or function that is renamed takes the page that tells of it along."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    code = {word for path in _code() for word in re.findall(r"\w+", path.read_text())}
    told = {name for name in re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`", page) if not name.endswith(".py")}

    assert {name for name in told if not set(name.split(".")) <= code} == set()


def test_each_experiment_is_in_the_index() -> None:
    """The index has one line for each page, with its title and its date."""
    lines = re.findall(r"^- ([\d-]+) · \[(.*)\]\((.*?)\): ", (EXPERIMENTS / "README.md").read_text(), re.MULTILINE)
    pages = []
    for page in EXPERIMENTS.glob("*/*.md"):
        title, date = re.match(r"# (.*)\n\n([\d-]+)\. In short: ", page.read_text()).groups()  # type: ignore[union-attr]
        pages.append((date, title, str(page.relative_to(EXPERIMENTS))))

    assert sorted(lines) == sorted(pages)


def test_each_page_says_who_it_is_for_and_has_commands() -> None:
    """A page begins with its readers, what they can do after it, and three commands; an experiment with its result."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.parent != EXPERIMENTS]
    heads = {str(page.relative_to(ROOT)): page.read_text().partition("\n## ")[0] for page in pages}
    begins = re.compile(r"# .*\n\nFor (?s:.*?)After\s+this\s+page\s+you(?s:.*?)```sh\n(?:.*\n){3,}?```\n")

    assert [name for name, head in heads.items() if begins.match(head) is None] == []


def test_the_table_of_errors_has_each_with_its_status() -> None:
    """What to do about an error is told to those who call: each that has a code is in docs/call-it.md, and no other
    status stands beside it."""
    rows = re.findall(r"^\| (\d{3}) \| (`.*?`) \|", (ROOT / "docs" / "call-it.md").read_text(), re.MULTILINE)
    told = {(code, int(status)) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    modules = {module.__name__ for module in OF}
    known = {(one.code, one.status) for one in errors_below(ServiceError) if one.code and one.__module__ in modules}

    assert known - told == set()
    assert {pair for pair in told if pair[0] in dict(known)} - known == set()


def test_calls_are_shown_with_what_the_table_says() -> None:
    """Word for word, but for links; only what no call can meet has none."""
    rows = re.findall(r"^\| \d{3} \| (`.*?`) \| (.*) \|$", (ROOT / "docs" / "call-it.md").read_text(), re.MULTILINE)
    told = {code: SHOWN.sub(r"\1", words) for codes, words in rows for code in re.findall(r"`(\w+)`", codes)}

    assert {code: told.get(code) for code in ADVICE} == dict(ADVICE)
    assert {told[code] for code in told.keys() - ADVICE.keys()} == {told[code] for code in NOT_OF_CALLS}


# One of each row that tells of no call: of keys, other paths, batches, files and what is kept.
NOT_OF_CALLS = (
    *("invalid_api_key", "method_not_supported", "invalid_callback_url", "route_not_found", "upgrade_required"),
    *("empty_batch", "period_too_long", "batch_not_found", "correction_exists", "results_erased"),
    "storage_limit_exceeded",
)
SHOWN = re.compile(r" \(\[[^\]]*\.md\]\([^)]*\)\)|\[([^\]]*)\]\([^)]*\)")


def errors_below(kind: type[ServiceError]) -> Iterator[type[ServiceError]]:
    for one in kind.__subclasses__():
        yield one
        yield from errors_below(one)
