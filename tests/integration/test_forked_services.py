# Commands forked from a process that has imported them are to their tests what a user starts.

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, cast

from gateway.run.processes import state_of, stop
from tests.support.config_text import write_config
from tests.support.forked_services import MARK, fork_service
from tests.support.waiting import until


def test_a_forked_command_is_a_child_with_a_log_and_a_status(tmp_path: Path) -> None:
    """It says what the command says, where it is told to, and ends with its status."""
    config = write_config(
        tmp_path / "tollgate.yaml", "postgresql://a:b@127.0.0.1:9/c", "redis://127.0.0.1:9/0", "http://127.0.0.1:9/v1"
    )
    environment = {**os.environ, MARK: "0123456789abcdef"}
    fine = fork_service(["config", "check", str(config)], tmp_path / "fine", environment)
    wrong = fork_service(["config", "check", str(tmp_path / "none")], tmp_path / "wrong", environment)

    assert (fine.wait(60), wrong.wait(60)) == (0, 1)
    assert "fine: " in (tmp_path / "fine").read_text()
    assert str(tmp_path / "none") in (tmp_path / "wrong").read_text()


def test_a_forked_command_can_be_found_and_killed(tmp_path: Path) -> None:
    """By its mark, as any process that has it in its environment; it leads a group of its own. One that does not end
    when it is asked to is killed."""
    config = write_config(
        tmp_path / "tollgate.yaml", "postgresql://a:b@127.0.0.1:9/c", "redis://127.0.0.1:9/0", "http://127.0.0.1:9/v1"
    )
    environment = {**os.environ, MARK: "fedcba9876543210"}
    worker = fork_service(["work", "--config", str(config)], tmp_path / "log", environment)
    status = Path(f"/proc/{worker.pid}")
    until(lambda: b"fedcba9876543210" in (status / "environ").read_bytes())
    until(lambda: os.getpgid(worker.pid) == worker.pid)

    assert f"PPid:\t{os.getpid()}\n" in (status / "status").read_text()
    assert worker.poll() is None
    assert stop(cast(Any, worker), 0.1, signal.SIGCONT) == -signal.SIGKILL and state_of(worker.pid) is None
