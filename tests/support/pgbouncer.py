# PgBouncer in transaction mode before a Postgres, where this machine has one that carries prepared statements along.

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import make_url

from gateway.run.processes import free_port
from tests.support.waiting import until

CARRIES_STATEMENTS = (1, 21)  # the first version that does


def find_pgbouncer() -> str | None:
    """Return where it is."""
    program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if program is None:
        return None
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return program if tuple(map(int, re.findall(r"\d+", said)[:2])) >= CARRIES_STATEMENTS else None


@contextmanager
def running_pgbouncer(program: str, url: str, *, size: int) -> Iterator[str]:
    """Run it with so many connections to Postgres, and give the URL by this way."""
    target, port = make_url(url), free_port()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # as root it runs as nobody
        config = Path(folder, "pgbouncer.ini")
        config.write_text(
            f"[databases]\n{target.database} = host={target.host} port={target.port} user={target.username} "
            f"password={target.password}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n"
            f"unix_socket_dir =\nauth_type = any\npool_mode = transaction\ndefault_pool_size = {size}\n"
            "max_client_conn = 5000\nmax_prepared_statements = 200\n"
        )
        user = "nobody" if os.geteuid() == 0 else None
        running = subprocess.Popen([program, "-q", config], user=user, stderr=subprocess.DEVNULL)
        try:
            until(lambda: _is_open(port))
            yield target.set(port=port).render_as_string(hide_password=False)
        finally:
            running.terminate()
            running.wait(10)


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
