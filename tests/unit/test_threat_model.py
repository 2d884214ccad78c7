# The threat model says by which test each attack is held: it must be there.

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "threat-model.md").read_text()


def test_every_test_that_is_named_exists() -> None:
    """A test that goes, or gets another name, takes the page along."""
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).is_file() or (name and f"def {name}(" not in (ROOT / file).read_text())
    ]

    assert len(named) > 50
    assert missing == []


def test_every_attack_has_a_test() -> None:
    """No row only claims."""
    rows = [line for line in PAGE.partition("## A stranger")[2].splitlines() if line.startswith("| ")]
    attacks = [line for line in rows if not line.startswith(("| attack", "| ---"))]

    assert len(attacks) > 30
    assert [line for line in attacks if "`tests/" not in line.split("|")[3]] == []
