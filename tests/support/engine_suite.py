# How suites of other engines' HTTP APIs are run, by pytest beside ours, before what tests/peers/conftest.py has.

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

from tests.support.house import House

RANDOM = "a random model answers nothing of use, calls no tool unasked, and may end a JSON text late"


def outcomes_of(
    house: House, folder: Path, home: Path, env: Mapping[str, str], *more: str
) -> dict[str, tuple[str, str]]:
    """Run the tests in ``home``, a conftest.py among them; return what became of each, and why."""
    known = {"PATH": os.environ["PATH"], "HOME": str(home), "TOLLGATE_URL": house.url, "TOLLGATE_KEY": house.team_key}
    report, plain = home / "report.xml", ("-o", "anyio_mode=auto", "-W", "ignore", "--tb=line", "--timeout=90")
    command = [sys.executable, "-m", "pytest", *plain, f"--junitxml={report}", "-p", "no:cacheprovider", *more, "tests"]
    env = {**known, "TOLLGATE_MODEL": str(folder), **env}
    subprocess.run(command, cwd=home, env=env, timeout=1500, check=False)
    outcomes = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        found = [(one.tag, one.get("message", "")) for one in case if one.tag in ("failure", "error", "skipped")]
        name = f"{case.get('classname', '').rpartition('.test_')[2]}::{case.get('name')}"
        outcomes[name] = found[0] if found else ("passed", "")
    return outcomes


def unexplained(outcomes: Mapping[str, tuple[str, str]], expected: Mapping[str, str]) -> dict[str, str]:
    """Return which tests failed and why, but for those that are ``expected`` to."""
    failed = {name: why for name, (what, why) in outcomes.items() if what in ("failure", "error")}
    return {name: why for name, why in failed.items() if name.partition("[")[0] not in expected}
