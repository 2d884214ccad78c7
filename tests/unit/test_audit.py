# The audit of dependencies: what it finds fails, what is noted with a reason passes until its day, and what cannot be
# asked is SKIPPED, never clean.

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CLEAN = {"name": "anyio", "version": "4.1", "vulns": []}
HARMED = {
    "name": "jinja2",
    "version": "3.1.0",
    "vulns": [
        {
            "id": "PYSEC-2026-1",
            "aliases": ["CVE-2026-1", "GHSA-aaaa-bbbb-cccc"],
            "fix_versions": ["3.1.9"],
            "description": "A template escapes its sandbox.\nAnd more.",
        }
    ],
}
UNKNOWN = {"name": "torch", "skip_reason": "Dependency not found"}
VIA = {
    "name": "ws",
    "range": "<8.1",
    "title": "A frame without end",
    "url": "https://example.com/advisories/GHSA-dddd-eeee-ffff",
}
NPM_CLEAN: dict[str, Any] = {"vulnerabilities": {}}
NPM_HARMED = {"vulnerabilities": {"ws": {"via": [VIA]}, "openai": {"via": ["ws"]}}}
NPM_AWAY = {"message": "405 Method Not Allowed", "error": {}}


class Audit:
    """A copy of the audit, with registries that say what a test has them say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in (".ci/audit", "locks/gateway.txt", "tests/node/package.json"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        self.accept("")

    def accept(self, text: str) -> None:
        (self.folder / ".ci" / "accepted.toml").write_text(text)

    def run(self, *pip: dict[str, Any], npm: dict[str, Any]) -> tuple[int, str]:
        """Return the exit status and what was printed."""
        for program, answer in {"pip-audit": {"dependencies": pip}, "npm": npm}.items():
            script = self.folder / program
            script.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(answer)}\nEND\n")
            script.chmod(0o755)
        env = {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}"}
        done = subprocess.run([sys.executable, self.folder / ".ci" / "audit"], env=env, capture_output=True, text=True)
        assert done.stderr == ""
        return done.returncode, done.stdout


@pytest.fixture
def audit(tmp_path: Path) -> Audit:
    """An audit that accepts nothing."""
    return Audit(tmp_path)


def test_a_finding_fails_and_says_what_mends_it(audit: Audit) -> None:
    """Package, version, name, what it is, and the version without it; once, however many bring it."""
    status, said = audit.run(CLEAN, HARMED, npm=NPM_HARMED)

    assert status == 1
    assert "FOUND PYSEC-2026-1 in jinja2 3.1.0: A template escapes its sandbox.\n  mended in: 3.1.9" in said
    assert said.count("FOUND GHSA-dddd-eeee-ffff in ws <8.1: A frame without end") == 1
    assert "constraints.txt" in said and ".ci/accepted.toml" in said


def test_nothing_found_passes(audit: Audit) -> None:
    """Both registries answered and know nothing."""
    assert audit.run(CLEAN, npm=NPM_CLEAN) == (0, "pip-audit: 0 found\nnpm audit: 0 found\n")


def test_what_cannot_be_asked_is_skipped_and_never_clean(audit: Audit) -> None:
    """No registry, or one that knows only some of the packages: it says so, with the reason."""
    assert audit.run(UNKNOWN, npm=NPM_AWAY) == (
        0,
        "SKIPPED: pip-audit: Dependency not found\nSKIPPED: npm audit: 405 Method Not Allowed\n",
    )
    status, said = audit.run(UNKNOWN, HARMED, npm=NPM_AWAY)
    assert status == 1
    assert "SKIPPED: pip-audit: nothing is known of torch" in said


@pytest.mark.parametrize(("days", "reason", "status"), [(1, "never called", 0), (-1, "never called", 1), (1, "", 1)])
def test_a_harmless_one_is_noted_with_a_reason_until_a_day(audit: Audit, days: int, reason: str, status: int) -> None:
    """By any of its names; after the day, or without a reason, it fails again."""
    until = datetime.now(UTC).date() + timedelta(days=days)
    audit.accept(f'[[accepted]]\nid = "GHSA-aaaa-bbbb-cccc"\nreason = "{reason}"\nuntil = {until}\n')

    found, said = audit.run(HARMED, npm=NPM_CLEAN)

    assert found == status
    assert ("never called" in said) == (status == 0)


def test_notes_are_whole() -> None:
    """Each has an id, a reason and a day."""
    notes = tomllib.loads((ROOT / ".ci" / "accepted.toml").read_text()).get("accepted", [])

    assert [note for note in notes if note.keys() != {"id", "reason", "until"}] == []
