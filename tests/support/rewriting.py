# Test files compiled once for all test processes. pytest rewrites the asserts of every file that it imports and keeps
# the outcome in __pycache__. Processes that start together on a fresh checkout would each do all of that, for seven
# seconds of CPU: so each does a share of it first, and finds the others' shares done.

from __future__ import annotations

import compileall
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("protocol", "router", "billing", "gateway", "gpu_backend", "migrations", "tools", "tests")


def compile_share(config: pytest.Config) -> None:
    """Compile this process's share of tests and sources where that is still to be done; nothing if it runs alone."""
    worker: dict | None = getattr(config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode:
        return
    number = int(worker["workerid"].removeprefix("gw"))
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    for file in files[number :: worker["workercount"]]:
        if file.name.startswith("test_") or file.name == "conftest.py":
            # Not pytest's public face. Where it is another one, every process compiles all by itself again.
            with suppress(ImportError, AttributeError, TypeError):
                _rewrite(file, config)
        else:
            compileall.compile_file(file, quiet=2)


def _rewrite(file: Path, config: pytest.Config) -> None:
    from _pytest.assertion import rewrite

    cache = rewrite.get_cache_dir(file)
    kept = cache / (file.stem + rewrite.PYC_TAIL)
    if not kept.exists() and rewrite.try_makedirs(cache):  # one of an older source is made anew as the file is imported
        source_hash, code = rewrite._rewrite_test(file, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, kept)
