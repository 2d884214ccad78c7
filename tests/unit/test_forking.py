# `pytest --forks`: which process runs which test, and that whatever happens there is told here.

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FIRST = """
import os, warnings, pytest
@pytest.fixture(scope="module")
def place():
    yield os.getpid()
    print("taken down")
def test_one(place):
    assert place == os.getpid() and os.environ["PYTEST_XDIST_WORKER"]
def test_two(place, tmp_path):
    warnings.warn("beware")
    assert place == os.getpid() and tmp_path.parent.name.startswith("gw")
def test_three(place):
    assert place == 0, "said of three"
"""
DYING = "import os\ndef test_four(): os._exit(7)\ndef test_lost(): pass\n"
THIRD = "import pytest\ndef test_five(): pass\n@pytest.mark.skip\ndef test_six(): pass\n"


def run(folder: Path, *options: str, **files: str) -> str:
    """Return what pytest says of ``files`` in two forks."""
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", folder, "-p", "tests.support.forking"]
    command += ["-p", "no:xdist", "-p", "no:hypothesispytest", "-p", "no:anyio", "--forks", "2", *options, folder]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return f"{done.stdout}{done.stderr}status {done.returncode}"


def test_what_happens_in_a_fork_is_reported(tmp_path: Path) -> None:
    """Outcomes, words of failures, warnings, what a fixture's end printed; a process's death is the failure of its
    test, the other files are run all the same, and what has not run is told."""
    said = run(tmp_path, "-v", first=FIRST, dying=DYING, third=THIRD)

    assert "2 failed, 3 passed, 1 skipped, 1 warning" in said and "status 1" in said
    assert all(words in said for words in ("said of three", "taken down", "UserWarning: beware"))
    assert "its process has died (7)" in said and "[gw" in said
    assert "2 tests have not run" in said  # the one that it died in has not ended


def test_a_run_ends_at_its_first_failure_where_that_is_asked_for(tmp_path: Path) -> None:
    """With -x no test is begun after it, in any process."""
    said = run(tmp_path, "-vx", **{f"a{number}": FIRST for number in range(9)})

    assert "stopping after" in said and "status 1" in said
    assert 2 <= said.count("PASSED") <= 4  # of 18: one file in each process
