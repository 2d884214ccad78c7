# Test processes beside each other collect the files that they run, and no others.

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.scheduling import LoadGroupScheduling
from tests.support.whole_files import LATE, WholeFile, is_collected, takes_unmarked


def test_a_process_collects_the_files_that_it_runs(request: pytest.FixtureRequest) -> None:
    """Each file is one item, collected when it is its turn, as this one is."""
    if LATE not in getattr(request.config, "workerinput", {}):
        pytest.skip("SKIPPED: this process runs alone, or files are not shared out whole")
    items = request.session.items

    assert all(isinstance(item, WholeFile) for item in items)
    assert Path(__file__) in [item.path for item in items if is_collected(item)]
    assert all(each is not globals() for each in gc.get_objects())  # the garbage collector leaves out what is imported


@pytest.mark.parametrize(
    ("marks", "takes"), [("", True), ("not soak and not gpu", True), ("soak", False), ("soak or not gpu", True)]
)
def test_a_mark_is_looked_for_among_tests(marks: str, takes: bool) -> None:
    """A file that is not collected has none: by ``-m soak`` all were left out, and `make soak` ran nothing."""
    assert takes_unmarked(marks) is takes


class Process:
    """One of several that run tests, as the scheduler knows it."""

    def __init__(self) -> None:
        self.given: list[int] = []
        self.shutting_down = False
        self.gateway = SimpleNamespace(id="gw")

    def send_runtest_some(self, items: list[int]) -> None:
        self.given += items

    def shutdown(self) -> None:
        self.shutting_down = True


def test_a_process_in_a_crashed_ones_place_begins() -> None:
    """It hears of another item, or that there is none: else it waits with the one that it has."""
    config: Any = SimpleNamespace(getvalue=lambda _: ["popen"], option=SimpleNamespace(loadscopereorder=False))
    scheduling, files = LoadGroupScheduling(config), ["tests/unit/a.py::all", "tests/unit/b.py::all"]
    crashed, other = Process(), Process()
    for process in (crashed, other):
        node: Any = process
        scheduling.add_node(node)
        scheduling.add_node_collection(node, files)
        scheduling.schedule()
        if process is crashed:
            scheduling.mark_test_complete(node, 0)
            assert scheduling.remove_node(node) == files[1]

    assert crashed.given == [0, 1]
    assert (other.given, other.shutting_down) == ([1], True)
