# Tests and sources compiled before they are imported, by as many processes as tests will run in. pytest rewrites the
# asserts of each test file that it imports and keeps the outcome in __pycache__: on a fresh checkout 10 s of CPU.

from __future__ import annotations

import compileall
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("protocol", "router", "billing", "gateway", "gpu_backend", "migrations", "tools", "tests")


def compile_in_forks(config: pytest.Config) -> None:
    """Compile what is still to be compiled; nothing where tests run in this process alone."""
    forks = config.option.forks
    if forks < 2 or config.option.collectonly or sys.dont_write_bytecode:
        return
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    pids = []
    for number in range(forks):
        if (pid := os.fork()) == 0:
            try:
                _compile(files[number::forks], config)
            finally:
                os._exit(0)  # what is not compiled now is compiled as it is imported
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


def _compile(files: list[Path], config: pytest.Config) -> None:
    for file in files:
        if file.name.startswith("test_") or file.name == "conftest.py":
            # Not pytest's public face. Where it is another one, the files are compiled one after the other.
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
