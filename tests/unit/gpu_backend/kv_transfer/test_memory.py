# Memory that engines of one machine share: written by those alone who are told its name, and gone with its owner.

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_backend.kv_transfer.memory import SharedMemory, open_memory, write_all


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    memory = SharedMemory(100)
    yield memory
    memory.close()


def test_what_another_writes_is_read(memory: SharedMemory) -> None:
    """As often as it writes, from the beginning; more than there is room for is not written, nor makes more room."""
    descriptor = open_memory(memory.where)
    assert descriptor is not None
    try:
        assert write_all(descriptor, memoryview(b"block"))
        assert memory.read(5) == b"block"
        assert write_all(descriptor, memoryview(b"clock"))
        assert memory.read(5) == b"clock"
        assert not write_all(descriptor, memoryview(bytes(101)))
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 5)  # whoever then read what is gone would be ended
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("other", [{"name": "tollgate-kv-00"}, {"name": "another"}, {"process": 2**22 + 1}], ids=str)
def test_memory_that_is_not_told_is_not_opened(other: dict[str, Any], memory: SharedMemory) -> None:
    """As by an engine of another machine, where a process of this number may have another file."""
    assert open_memory({**memory.where, **other}) is None


def test_a_file_or_memory_of_others_is_not_opened(tmp_path: Path) -> None:
    """A told descriptor may be anything that the process has open."""
    theirs = os.memfd_create("another")
    with (tmp_path / "memfd:tollgate-kv-00 (deleted)").open("w") as file:
        found = [
            open_memory({"process": os.getpid(), "descriptor": file.fileno(), "name": "tollgate-kv-00"}),
            open_memory({"process": os.getpid(), "descriptor": theirs, "name": "another"}),
        ]
    os.close(theirs)

    assert found == [None, None]


def test_memory_that_is_closed_is_not_found() -> None:
    """Who has not opened it by then sends over the connection."""
    memory = SharedMemory(100)
    where = memory.where
    memory.close()

    assert open_memory(where) is None
