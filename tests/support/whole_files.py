# A test file is collected by the process that runs it, when it does. Processes of pytest-xdist each collect everything
# before their first test, and are told then which of it is theirs: with four, three quarters of that are for nothing.
# So a file is one item to them, shared out as a file is anyhow; to run it is to collect it and run what is found there.

from __future__ import annotations

import gc
from typing import Any

import pytest
from _pytest.mark.expression import Expression

LATE = "collects_late"  # in what a process is told at its start
CHOOSING = ("keyword", "deselect", "lf", "failedfirst", "stepwise")  # options that choose tests by what was collected
_IS_OPEN = pytest.StashKey[bool]()  # of a file that is to be collected


class WholeFile(pytest.Item):
    """All tests of a file that is not collected yet."""

    _running: pytest.Item | None = None

    @property
    def nodeid(self) -> str:
        """The test's that runs: reports come under this item's number, and must be of its name."""
        return super().nodeid if self._running is None else self._running.nodeid

    def runtest(self) -> None:
        """It has no test of its own."""

    def run_all(self, nextitem: pytest.Item | None) -> bool:
        """Collect the file, and run its tests."""
        file, session = self.parent, self.session
        assert isinstance(file, pytest.Module)
        file.stash[_IS_OPEN] = True
        gc.collect()  # what the file before left behind
        gc.disable()
        items = list(session.genitems(file))
        self.config.hook.pytest_collection_modifyitems(session=session, config=self.config, items=items)
        gc.freeze()  # what is imported stays: from here on look at what tests leave behind alone
        gc.enable()
        for item, following in zip(items, [*items[1:], nextitem], strict=False):
            self._running = item
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail or session.shouldstop:
                break
        self._running = None
        return True


def is_collected(whole: pytest.Item) -> bool:
    """Whether its tests are run, or have been."""
    return whole.parent is not None and _IS_OPEN in whole.parent.stash


def collects_late(config: pytest.Config) -> bool:
    """Whether processes are to be told so: files go to them whole, and nothing asks for some tests of one."""
    option = config.getoption
    is_of_files = option("dist") == "loadfile" and not any("::" in argument for argument in config.args)
    return is_of_files and takes_unmarked(option("markexpr")) and not any(option(name, None) for name in CHOOSING)


def takes_unmarked(marks: str) -> bool:
    """Whether ``-m`` leaves a test without marks, as a file is before it is collected."""
    return not marks or Expression.compile(marks).evaluate(lambda name, /, **_: False)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process that is about to start. How many tests there are, and so what share is done, is not known then."""
    if collects_late(node.config):
        node.workerinput[LATE] = True
        node.config.pluginmanager.get_plugin("terminalreporter")._show_progress_info = False


def pytest_make_collect_report(collector: pytest.Collector) -> pytest.CollectReport | None:
    """Find a file to be one item, unless it is to be collected now."""
    is_late = getattr(collector.config, "workerinput", {}).get(LATE, False)
    if not is_late or not isinstance(collector, pytest.Module) or _IS_OPEN in collector.stash:
        return None
    whole = WholeFile.from_parent(collector, name="all")
    whole.add_marker(pytest.mark.timeout(0))  # each test has its own
    return pytest.CollectReport(collector.nodeid, "passed", None, [whole])
