# Keeps a set of processes alive: a child that dies is started again, later each time it dies young; at the end all are
# asked to stop, in order. Used by `tollgate dev` for the whole stack and by `tollgate serve` for its workers.
#
# The signals are blocked here and fetched when there is time for them, so none can come between. Threads that a library
# has started do not block them: for those there is a handler that only takes note.

from __future__ import annotations

import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gateway.run.processes import descendants_of

FIRST_DELAY = 0.1  # seconds before a child that died is started again
LONGEST_DELAY = 5.0
HURRY = 3.0  # seconds that children have to end when asked twice
LOOK_EVERY = 2.0  # seconds between looks whether a child is spent
STEADY_AFTER = 10.0  # seconds; a child that lived this long has a clean record
STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
AWAITED = STOP_SIGNALS | {signal.SIGCHLD}


class StopRequested(Exception):
    """A signal asks the whole stack to stop."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number)
        self.number = number


class StartFailed(Exception):
    """Something cannot start; the message says what and why."""


@dataclass
class Child:
    """One process to keep alive. ``role`` is what pids are listed under; ``launch`` starts it and returns at once."""

    role: str
    launch: Callable[[], subprocess.Popen[bytes]]
    stop_signal: signal.Signals = signal.SIGTERM
    patience: float = 10.0  # seconds between the stop signal and SIGKILL
    lists_descendants: bool = True
    is_spent: Callable[[], bool] | None = None  # looked at now and then: it runs, but is of no use any more
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0  # monotonic seconds
    restart_at: float | None = None
    looked_at: float = 0.0  # monotonic seconds
    deaths: int = 0  # in a row, each soon after its start

    def start(self) -> None:
        """Start the process."""
        self.process = self.launch()
        self.started_at = self.looked_at = time.monotonic()
        self.restart_at = None

    def pids(self) -> list[int]:
        """Return the live processes of this child, itself first."""
        if self.process is None or self.process.poll() is not None:
            return []
        below = descendants_of(self.process.pid) if self.lists_descendants else []
        return [self.process.pid, *below]


def restart_delay(deaths: int) -> float:
    """Return how long a child that has died ``deaths`` times in a row, each time young, waits for its next start."""
    return min(LONGEST_DELAY, FIRST_DELAY * 2 ** (deaths - 1)) if deaths else FIRST_DELAY


@dataclass
class Supervisor:
    """Owns the children. ``say`` hears of deaths; ``pids_changed`` is called with all pids whenever they change."""

    say: Callable[[str], None] = lambda words: None
    pids_changed: Callable[[dict[str, list[int]]], None] = lambda pids: None
    on_hangup: Callable[[], None] | None = None  # called at SIGHUP; without it, SIGHUP is a stop signal like another
    children: list[Child] = field(default_factory=list)
    _pids: dict[str, list[int]] | None = None
    _noted: deque[signal.Signals] = field(default_factory=deque)  # arrived in another thread

    def __enter__(self) -> Supervisor:
        self._handlers = {
            number: signal.signal(number, lambda arrived, _: self._noted.append(signal.Signals(arrived)))
            for number in STOP_SIGNALS
        }
        signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            _kill(child)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def start(self, child: Child) -> None:
        """Start a child and keep it alive from now on."""
        self.children.append(child)
        child.start()
        self.note_pids()

    def pause(self, seconds: float) -> None:
        """Wait, or return early because a child died; raise StopRequested when a signal asks for the end."""
        number = self._noted.popleft() if self._noted else self._next_signal(seconds)
        if number is signal.SIGHUP and self.on_hangup is not None:
            self.on_hangup()
        elif number in STOP_SIGNALS:
            raise StopRequested(number)

    def _next_signal(self, seconds: float) -> signal.Signals | None:
        arrived = signal.sigtimedwait(AWAITED, seconds)
        # Python returns what lay in memory where this process was stopped (SIGSTOP, a frozen container) until the end.
        return signal.Signals(arrived.si_signo) if arrived is not None and arrived.si_signo in AWAITED else None

    def tend(self) -> None:
        """Start again what has died and waited long enough, and end what is spent, so that it is started again."""
        now = time.monotonic()
        for child in self.children:
            self._end_if_spent(child, now)
            if child.restart_at is None and child.process is not None and child.process.poll() is not None:
                child.deaths = child.deaths + 1 if now - child.started_at < STEADY_AFTER else 0
                delay = restart_delay(child.deaths)
                child.restart_at = now + delay
                self.say(f"{child.role} ended ({_ending(child.process.returncode)}); starting it again in {delay:g} s")
            if child.restart_at is not None and now >= child.restart_at:
                child.start()
        self.note_pids()

    def _end_if_spent(self, child: Child, now: float) -> None:
        if child.is_spent is None or child.restart_at is not None or now - child.looked_at < LOOK_EVERY:
            return
        child.looked_at = now
        if child.is_spent():
            self.say(f"{child.role} is spent; ending it, so that it starts again")
            _send(child, child.stop_signal)

    def pids(self) -> dict[str, list[int]]:
        """Return the live pids of every role."""
        pids: dict[str, list[int]] = {}
        for child in self.children:
            pids.setdefault(child.role, []).extend(child.pids())
        return pids

    def note_pids(self) -> None:
        """Report the live pids if they are others than last time."""
        if (pids := self.pids()) != self._pids:
            self._pids = pids
            self.pids_changed(pids)

    def signal_all(self, number: signal.Signals, *roles: str) -> None:
        """Send a signal to the children of these roles."""
        for child in self.children:
            if child.role in roles:
                _send(child, number)

    def first_dead(self) -> Child | None:
        """Return a child that does not run, if any: while the stack is being started that is a failure."""
        return next((child for child in self.children if child.process and child.process.poll() is not None), None)

    def stop(self, waves: Iterable[Sequence[str]]) -> None:
        """End the children, wave by wave of roles; a wave begins when the one before has ended.

        One more stop signal is passed on, and then no child is waited for any longer than ``HURRY`` seconds.
        """
        hurried_at: float | None = None
        for roles in waves:
            wave = [child for child in self.children if child.role in roles and child.process is not None]
            for child in wave:
                _send(child, child.stop_signal)
            asked_at = time.monotonic()
            while running := [child for child in wave if child.process and child.process.poll() is None]:
                now = time.monotonic()
                is_over = hurried_at is not None and now - max(hurried_at, asked_at) > HURRY
                for child in running:
                    if is_over or now - asked_at > child.patience:
                        _kill(child)
                try:
                    self.pause(0.05)
                except StopRequested:
                    hurried_at = hurried_at or time.monotonic()
                    for child in running:
                        _send(child, child.stop_signal)
            self.note_pids()


def _send(child: Child, number: signal.Signals) -> None:
    if child.process is not None and child.process.poll() is None:
        child.process.send_signal(number)


def _kill(child: Child) -> None:
    if child.process is not None and child.process.poll() is None:
        child.process.kill()
        child.process.wait()


def _ending(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
