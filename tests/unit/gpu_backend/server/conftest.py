# One front for all tests of a process, with a scripted engine behind it: starting one takes half a second.

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gpu_backend.step.messages import FinishReason
from tests.support.fake_engine import FakeEngine, speaking
from tests.support.front import END, running_front, token_ids, write_small_files


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_files(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def shared_engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="session")
def url(folder: Path, shared_engine: FakeEngine) -> Iterator[str]:
    with running_front(folder, shared_engine) as url:
        yield url


@pytest.fixture
def engine(shared_engine: FakeEngine) -> FakeEngine:
    """The engine behind ``url``; each test gives it a script."""
    shared_engine.script = speaking([*token_ids("Hello"), END], FinishReason.STOP)
    shared_engine.process.commands.clear()
    return shared_engine


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=10) as client:
        yield client
