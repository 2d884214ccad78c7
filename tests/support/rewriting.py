# What is made of the sources once for all test processes. pytest rewrites the asserts of every file that it imports and
# keeps the outcome in __pycache__; hypothesis keeps the numbers and strings of the sources, and which characters are
# text, in .hypothesis. Processes that start together on a fresh checkout would each do all of that, for fourteen
# seconds of CPU: so each does a share of it first, and finds the others' shares done.

from __future__ import annotations

import compileall
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("protocol", "router", "billing", "gateway", "gpu_backend", "migrations", "tools", "tests")


def do_share(config: pytest.Config) -> None:
    """Do this process's share of the work on tests and sources that is still to be done; nothing if it runs alone."""
    worker: dict | None = getattr(config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode:
        return
    number = int(worker["workerid"].removeprefix("gw"))
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    for file in files[number :: worker["workercount"]]:
        # Not public faces of pytest and hypothesis. Where they are others, every process does all by itself again.
        with suppress(ImportError, AttributeError, TypeError):
            if file.name.startswith("test_") or file.name == "conftest.py":
                _rewrite(file, config)
                continue
            compileall.compile_file(file, quiet=2)
            _keep_constants(file)
    if number == 0:
        with suppress(ImportError):
            from hypothesis.internal.charmap import intervals_from_codec

            intervals_from_codec("utf-8")


def _rewrite(file: Path, config: pytest.Config) -> None:
    from _pytest.assertion import rewrite

    cache = rewrite.get_cache_dir(file)
    kept = cache / (file.stem + rewrite.PYC_TAIL)
    if not kept.exists() and rewrite.try_makedirs(cache):  # one of an older source is made anew as the file is imported
        source_hash, code = rewrite._rewrite_test(file, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, kept)


def _keep_constants(file: Path) -> None:
    from hypothesis.internal.constants_ast import constants_from_module, is_local_module_file

    if is_local_module_file(str(file)):
        module = ModuleType(file.stem)
        module.__file__ = str(file)
        constants_from_module(module)
