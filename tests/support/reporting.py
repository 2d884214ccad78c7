# What a test process says of a test to the process that counts them. pytest-xdist sends six messages of each, with
# every keyword and all that was printed; of a test that passed, two are read.

from __future__ import annotations

import pytest
from _pytest.runner import runtestprotocol

from tests.support.whole_files import WholeFile


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test beside other processes, and report how it passed, or all that did not."""
    if isinstance(item, WholeFile):
        return item.run_all(nextitem)
    option = item.config.getoption
    if not hasattr(item.config, "workerinput") or option("durations") is not None or option("xmlpath") is not None:
        return None  # it runs alone, or more is to be told
    is_shown = {*option("reportchars")} & {"P", "A"}  # what was printed, of tests that passed, too
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.passed and report.when != "call":
            continue
        if report.passed:
            report.keywords = {}
            report.sections = report.sections if is_shown else []
        item.ihook.pytest_runtest_logreport(report=report)
    return True
