# The Postgres beside which the benchmarks of journal and ledger run, what CPU it takes, and their page of results.

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import psutil

import migrations
from gateway.dev.embedded.postgres import EmbeddedPostgres

RESULTS = Path(__file__).parent / "results"


@contextmanager
def postgres_on_disk() -> Iterator[EmbeddedPostgres]:
    """Run a Postgres with its own settings, so that commits reach the disk, and the newest schema."""
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedPostgres(Path(folder))
        server.start()
        try:
            migrations.upgrade(server.url)
            yield server
        finally:
            server.remove()


def cpu_of(server: EmbeddedPostgres) -> float:
    """Return the CPU seconds of the server's living processes, finer than clock ticks."""
    children = psutil.Process(server.pid).children(recursive=True)
    return sum(int(Path(f"/proc/{child.pid}/schedstat").read_text().split()[0]) for child in children) / 1e9


def show(name: str, options: str, said: str, *, write: bool) -> None:
    """Print what ``python -m benchmarks.NAME OPTIONS`` measured, and ``write`` it to benchmarks/results/."""
    load = [round(each, 1) for each in os.getloadavg()]
    page = (
        f"# {name.capitalize()}, {date.today()}\n\n"
        f"`python -m benchmarks.{name} {options}` on {os.cpu_count()} cores ({platform.machine()}), "
        f"load average {load}, Python {platform.python_version()}.\n\n{said}\n"
    )
    print(page)
    if write:
        (RESULTS / f"{name}-{date.today()}.md").write_text(page)
