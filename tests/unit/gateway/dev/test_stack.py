# A house that `tollgate dev` cannot start: it says so in a line, and touches nothing of anybody's.

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gateway.dev.folder import StackFolder
from gateway.dev.stack import run_stack
from gateway.run.processes import free_port

pytestmark = pytest.mark.usefixtures("signals")


def test_a_config_file_that_cannot_be_read_is_named_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no house yet: nothing is made, and nothing but the fault is said."""
    status = run_stack(free_port(), tmp_path / "data", tmp_path / "missing.yaml", as_json=False)

    assert status == 1
    assert capsys.readouterr().err == f"{tmp_path / 'missing.yaml'}: cannot be read: No such file or directory\n"
    assert not (tmp_path / "data").exists()


def test_a_house_that_finds_its_folder_taken_leaves_it_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is written there of the other's processes stays."""
    folder = StackFolder(tmp_path)
    lock = folder.take(lambda seconds: None)
    folder.write_pids({"gateway": [1]})
    before = (tmp_path / "pids.json").read_bytes()

    status = run_stack(free_port(), tmp_path, None, as_json=False)
    os.close(lock)

    assert status == 1
    assert "is in use by another `tollgate dev`" in capsys.readouterr().err
    assert (tmp_path / "pids.json").read_bytes() == before
