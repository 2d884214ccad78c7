# A Postgres and a Valkey for the time of a test. The thousand files of Postgres lie in memory where that has room: a
# file system takes a second of CPU to make them.

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gateway.dev.embedded import EmbeddedPostgres, EmbeddedValkey
from gateway.run.processes import is_running

MEMORY = Path("/dev/shm")  # in a container often of 64 MiB only
ROOM = 4 << 30  # bytes


@contextmanager
def temporary_postgres(*, on_disk: bool = False, **server_settings: str) -> Iterator[EmbeddedPostgres]:
    """Run a Postgres that does not wait for the disk; nothing of it outlives the block. ``on_disk``: for much data."""
    fast = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", **server_settings}
    place = None if on_disk else _room_in_memory()
    with tempfile.TemporaryDirectory(prefix=f"tollgate-{os.getpid()}-", dir=place) as folder:
        server = EmbeddedPostgres(Path(folder), server_settings=fast)
        try:
            server.start()
            yield server
        finally:
            server.remove()


@contextmanager
def temporary_valkey() -> Iterator[EmbeddedValkey]:
    """Run a Valkey for a test: nothing of it outlives the block."""
    with tempfile.TemporaryDirectory(prefix="tollgate-") as folder, EmbeddedValkey(Path(folder)) as server:
        yield server


def _room_in_memory() -> Path | None:
    """Return where to, once what killed processes left there is gone."""
    if not (MEMORY.is_dir() and os.access(MEMORY, os.W_OK)):
        return None
    for left in MEMORY.glob("tollgate-*-*"):
        owner = left.name.split("-")[1]
        if owner.isdigit() and not is_running(int(owner)):
            shutil.rmtree(left, ignore_errors=True)
    return MEMORY if shutil.disk_usage(MEMORY).free > ROOM else None
