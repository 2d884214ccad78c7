# `tollgate migrate` as a process.

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from gateway.embedded import EmbeddedPostgres
from gateway.processes import free_port
from tests.support.config_text import write_config

TOLLGATE = Path(sys.executable).with_name("tollgate")


def test_it_waits_for_a_database_that_is_still_starting(tmp_path: Path) -> None:
    """Started before Postgres, and with Postgres busy recovering from a kill, it migrates as soon as it can."""
    postgres = EmbeddedPostgres(tmp_path / "data", server_settings={"fsync": "off"})
    config = write_config(tmp_path / "tollgate.yaml", postgres.url, "redis://127.0.0.1:9/0")
    command = [str(TOLLGATE), "migrate", "--config", str(config), "--wait", "60"]
    try:
        early = subprocess.Popen(command, stderr=subprocess.PIPE)
        postgres.start()
        first = early.communicate(timeout=60)[1]
        postgres.stop()
        again = subprocess.Popen(command, stderr=subprocess.PIPE)
        postgres.start()
        second = again.communicate(timeout=60)[1]
    finally:
        postgres.remove()

    assert (early.returncode, first) == (0, b"")
    assert (again.returncode, second) == (0, b"")


def test_an_unreachable_database_is_said_in_a_line(tmp_path: Path) -> None:
    """Without --wait a closed port ends it with status 1 and no traceback."""
    url = f"postgresql://tollgate:x@127.0.0.1:{free_port()}/tollgate"
    config = write_config(tmp_path / "tollgate.yaml", url, "redis://127.0.0.1:9/0")
    started = time.monotonic()
    done = subprocess.run([str(TOLLGATE), "migrate", "--config", str(config)], capture_output=True, text=True)

    assert done.returncode == 1
    assert "Postgres cannot be reached" in done.stderr and "Traceback" not in done.stderr
    assert time.monotonic() - started < 30
