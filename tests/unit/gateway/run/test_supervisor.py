# The supervisor: what dies is started again, later each time it dies young; what is stopped is stopped in order.

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.run.processes import descendants_of, free_port, is_running, spawn
from gateway.run.supervisor import Child, StopRequested, Supervisor, restart_delay
from tests.support.waiting import until

SLEEPER = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    """A supervisor; at the end its children are gone and signals arrive as before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with Supervisor() as supervisor:
        yield supervisor
    while signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}, 0):
        pass
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def signal_myself(number: signal.Signals) -> None:
    """Signal this thread, which blocks it: a test runner has other threads, which do not."""
    signal.pthread_kill(threading.get_ident(), number)


def launcher(log: Path, code: str = SLEEPER) -> Callable[[], subprocess.Popen[bytes]]:
    return lambda: spawn([sys.executable, "-c", code], log=log)


def wait_for(log: Path, words: str = "up", times: int = 1) -> None:
    until(lambda: log.exists() and log.read_text().count(words) >= times)


def test_a_child_that_dies_young_waits_longer_each_time() -> None:
    """The delay doubles from a tenth of a second to five seconds."""
    delays = [restart_delay(deaths) for deaths in range(10)]

    assert delays == [0.1, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


def test_one_that_was_stopped_goes_on(tmp_path: Path) -> None:
    """Ctrl-Z and fg, `docker pause`, a machine that slept: the wait was over meanwhile, and nothing has come."""
    code = (
        "from gateway.run.supervisor import Supervisor\n"
        "with Supervisor() as supervisor:\n"
        "    for _ in range(3):\n"
        "        print('up', flush=True)\n"
        "        supervisor.pause(0.2)\n"
    )
    process = launcher(tmp_path / "log", code)()
    for times in (1, 2, 3):
        wait_for(tmp_path / "log", times=times)
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        process.send_signal(signal.SIGCONT)

    assert process.wait(30) == 0, (tmp_path / "log").read_text()


def test_a_dead_child_is_started_again_and_its_pids_reported(supervisor: Supervisor, tmp_path: Path) -> None:
    """After SIGKILL another process runs, and whoever listens has heard of both."""
    heard: list[dict[str, list[int]]] = []
    supervisor.pids_changed = heard.append
    child = Child("sleeper", launcher(tmp_path / "log"))
    supervisor.start(child)
    first = child.pids()
    os.kill(first[0], signal.SIGKILL)

    def is_another() -> bool:
        supervisor.pause(0.01)
        supervisor.tend()
        return child.pids() not in ([], first)

    until(is_another)

    assert heard[0] == {"sleeper": first}
    assert heard[-1] == {"sleeper": child.pids()}


def test_a_spent_child_is_ended_and_started_again(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs, but is of no use any more; the one that takes its place is looked at afresh."""
    monkeypatch.setattr("gateway.run.supervisor.LOOK_EVERY", 0.0)
    spent: list[int] = []
    child = Child("sleeper", launcher(tmp_path / "log"), is_spent=lambda: child.pids() == spent)
    supervisor.start(child)
    wait_for(tmp_path / "log")
    supervisor.tend()
    first = child.pids()
    spent = first

    def is_replaced() -> bool:
        supervisor.tend()
        return child.pids() not in ([], first)

    until(is_replaced)
    second = child.pids()
    supervisor.tend()

    assert first != second == child.pids()


def test_a_signal_asks_for_the_end(supervisor: Supervisor) -> None:
    """SIGTERM is not lost while nobody waits: the next pause raises."""
    signal_myself(signal.SIGTERM)

    with pytest.raises(StopRequested):
        supervisor.pause(5)


def test_a_signal_that_another_thread_gets_counts_too(supervisor: Supervisor) -> None:
    """Threads of libraries do not block signals; one that arrives there ends nothing but the next pause."""
    thread = threading.Thread(target=take_signal)
    thread.start()
    thread.join()

    with pytest.raises(StopRequested):
        supervisor.pause(0.1)


def take_signal() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)


def test_waves_end_one_after_the_other_and_the_stubborn_are_killed(supervisor: Supervisor, tmp_path: Path) -> None:
    """A wave begins when the one before has ended, if need be by force."""
    stubborn = Child("first", launcher(tmp_path / "first", STUBBORN), patience=0.3)
    last = Child("last", launcher(tmp_path / "last"))
    for child in (stubborn, last):
        supervisor.start(child)
    wait_for(tmp_path / "first")
    seen: list[dict[str, list[int]]] = []
    supervisor.pids_changed = seen.append
    supervisor.stop([("first",), ("last",)])

    assert stubborn.process is not None and stubborn.process.returncode == -signal.SIGKILL
    assert last.process is not None and last.process.returncode == -signal.SIGTERM
    assert [sorted(role for role, pids in each.items() if pids) for each in seen] == [["last"], []]


def test_a_second_signal_ends_the_waiting(supervisor: Supervisor, tmp_path: Path) -> None:
    """Whoever presses Ctrl-C twice does not want to wait for the drain."""
    stubborn = Child("stubborn", launcher(tmp_path / "log", STUBBORN), patience=30)
    supervisor.start(stubborn)
    wait_for(tmp_path / "log")
    signal_myself(signal.SIGINT)
    started = time.monotonic()
    supervisor.stop([("stubborn",)])

    assert time.monotonic() - started < 20  # seconds, of the patience of 30


def test_a_child_dies_with_its_parent_and_so_do_its_own(tmp_path: Path) -> None:
    """SIGKILL of the parent reaches grandchildren that were started the same way."""
    log = tmp_path / "log"
    start = "import time; from pathlib import Path; from gateway.run.processes import spawn\n"
    start += f"log = Path({str(log)!r})\n"
    inner = start + "child = spawn({}, log=log)\ntime.sleep(60)"
    grandchild = [sys.executable, "-c", SLEEPER]
    child = [sys.executable, "-c", inner.format(repr(grandchild))]
    parent = subprocess.Popen([sys.executable, "-c", inner.format(repr(child))], cwd=Path(__file__).parents[4])
    wait_for(log)
    family = descendants_of(parent.pid)
    parent.kill()
    parent.wait()
    until(lambda: not any(map(is_running, family)))

    assert len(family) == 2


def test_a_free_port_is_the_preferred_one_unless_it_is_taken() -> None:
    """A restarted server keeps its port when it can."""
    port = free_port()
    kept = free_port(port)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        other = free_port(port)

    assert kept == port
    assert other != port
