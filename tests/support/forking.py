# `pytest --forks N`: the tests run in N processes, forked when everything is imported and collected. That takes ten
# seconds of CPU and is done once; what was imported lies in memory that they share. The tests of a file stay together
# and in order; each process that is free takes the next file, so files begin in the order of collection.

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

WORKER = "PYTEST_XDIST_WORKER"  # under which pytest-xdist, too, tells its processes who they are
PR_SET_PDEATHSIG = 1  # linux/prctl.h
FILE = 2  # bytes of a file's number in the queue


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --forks."""
    parser.addoption("--forks", type=int, default=1, metavar="N", help="run the files in N forks of this process")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in forks, where more than one is asked for."""
    option = session.config.option
    if option.forks < 2 or option.collectonly or (session.testsfailed and not option.continue_on_collection_errors):
        return None
    _Forks(session).run(option.forks)
    return True


@dataclass
class _Fork:
    """A process that runs files, and what it is running."""

    name: str
    pid: int
    nodeid: str = ""
    location: tuple[str, int | None, str] = ("", None, "")


class _Forks:
    """What forks and parent share: the files, a queue of their numbers, and whether all are to stop."""

    def __init__(self, session: pytest.Session) -> None:
        self.session, self.hook = session, session.config.hook
        self.files = [list(items) for _, items in groupby(session.items, lambda item: item.path)]
        self.queue, fill = os.pipe()
        os.write(fill, b"".join(number.to_bytes(FILE) for number in range(len(self.files))))
        os.close(fill)
        self.stop = mmap.mmap(-1, 1)
        self.finished = 0

    def run(self, count: int) -> None:
        """Run all tests and report them here, as if they had run here."""
        reporter = self.session.config.pluginmanager.getplugin("terminalreporter")
        reporter.showfspath = False  # of files that run beside each other
        reporter.flush()
        self.session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        forks: dict[Connection, _Fork] = {}
        try:
            for number in range(min(count, len(self.files))):
                here, there = Pipe(duplex=False)
                if (pid := os.fork()) == 0:
                    self._run_forked(f"gw{number}", there)
                forks[here] = _Fork(f"gw{number}", pid)
                there.close()
            while forks:
                for way in wait(list(forks)):
                    assert isinstance(way, Connection)
                    self._hear(forks, way)
        finally:
            for fork in forks.values():
                os.kill(fork.pid, signal.SIGTERM)
                os.waitpid(fork.pid, 0)
            os.close(self.queue)
        if self.session.shouldstop:
            raise self.session.Interrupted(self.session.shouldstop)
        if not self.session.shouldfail and (missing := len(self.session.items) - self.finished):
            self.session.shouldfail = f"{missing} tests have not run"
        if self.session.shouldfail:
            raise self.session.Failed(self.session.shouldfail)

    def _hear(self, forks: dict[Connection, _Fork], way: Connection) -> None:
        fork = forks[way]
        try:
            kind, told = way.recv()
        except EOFError:
            kind, told = "end", f"its process has died ({os.waitstatus_to_exitcode(os.waitpid(fork.pid, 0)[1])})"
        else:
            if kind == "end":
                os.waitpid(fork.pid, 0)
        if kind == "start":
            fork.nodeid, fork.location = told
            self.hook.pytest_runtest_logstart(nodeid=fork.nodeid, location=fork.location)
        elif kind == "report":
            report = self.hook.pytest_report_from_serializable(config=self.session.config, data=told)
            report.node = self._node(fork.name)
            self.hook.pytest_runtest_logreport(report=report)
        elif kind == "finish":
            self.finished += 1
            self.hook.pytest_runtest_logfinish(nodeid=fork.nodeid, location=fork.location)
        elif kind == "warning":
            name, text, place, *rest = told
            warning = warnings.WarningMessage(UserWarning(f"{name}: {text}"), UserWarning, *place)
            said = dict(zip(("when", "nodeid", "location"), rest, strict=True))
            self.hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": warning, **said})
        elif kind == "end":
            del forks[way]
            if told is not None:
                self.hook.pytest_runtest_logreport(
                    report=pytest.TestReport(fork.nodeid, fork.location, {}, "failed", told, "call")
                )
        if self.session.shouldfail or self.session.shouldstop:
            self.stop[0] = 1

    @staticmethod
    def _node(name: str) -> Any:
        """Return what pytest's own reporter looks for at a report from another process, to print its name."""
        return SimpleNamespace(gateway=SimpleNamespace(id=name), _workerinfocache=f"[{name}]")

    def _run_forked(self, name: str, way: Connection) -> NoReturn:
        """Be a fork: run files as long as there are any."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        failure = None
        try:
            config = self.session.config
            os.environ[WORKER] = name
            _write_apart(config, name)
            teller = _Teller(config)
            config.pluginmanager.register(teller)  # which is told of all warnings until now
            teller.way = way
            for item, following in self._due():
                config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if self.stop[0] or self.session.shouldfail or self.session.shouldstop:
                    break
            self.session._setupstate.teardown_exact(None)
        except BaseException:
            failure = traceback.format_exc()
        finally:
            way.send(("end", failure))
            os._exit(0)

    def _due(self) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
        """Yield tests, each with the one after it, which says what fixtures stay."""
        file = self._next_file()
        while file is not None:
            yield from pairwise(file)
            following = self._next_file()
            yield file[-1], following[0] if following else None
            file = following

    def _next_file(self) -> list[pytest.Item] | None:
        number = os.read(self.queue, FILE)
        return self.files[int.from_bytes(number)] if number else None


class _Teller:
    """Tells the parent what becomes of tests."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.way: Connection | None = None

    def _tell(self, kind: str, told: object) -> None:
        if self.way is not None:
            self.way.send((kind, told))

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        """A test begins."""
        self._tell("start", (nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A step of a test has ended."""
        self._tell("report", self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_runtest_logfinish(self) -> None:
        """A test has ended."""
        self._tell("finish", None)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        """Something was warned of."""
        place = warning_message.filename, warning_message.lineno
        told = warning_message.category.__name__, str(warning_message.message), place
        self._tell("warning", (*told, when, nodeid, location))


def _write_apart(config: pytest.Config, name: str) -> None:
    """Have this process print nothing, and capture output and make temporary folders beside those of the others."""
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    reporter = config.pluginmanager.getplugin("terminalreporter")
    reporter._tw = type(reporter._tw)(open(os.devnull, "w"))  # noqa: SIM115
    folders: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.getbasetemp() / name
    folders._basetemp.mkdir(mode=0o700)
