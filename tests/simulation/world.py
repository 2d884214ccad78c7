# The world of one seed: machines with disks, processes on them, the network, the database, and what befalls them.

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from billing.core.holds import HoldRequest, RefusedHold
from billing.core.ids import EPOCH, day_of
from billing.core.records import UsageRecord
from billing.quotas.callers import ASK_AGAIN, LEAST_ASKS, WAIT_FOR_ROOM
from billing.quotas.draws import ASK_WITHIN
from billing.quotas.lease_store import NANOUSD, TOKENS, Need
from billing.quotas.standing import LONGEST_PACE
from tests.simulation import invariants
from tests.simulation.invariants import Broken, Idle
from tests.simulation.loop import VirtualLoop
from tests.simulation.network import Receipt, Trouble
from tests.simulation.process import Process
from tests.simulation.sql_model import SqlModel, day_text

DISKS = "/dev/shm"
MIDNIGHT = 1_777_593_600.0  # 2026-05-01 00:00 UTC: a day and a month begin
TEAMS = {"t1": ("k1", "k2"), "t2": ("k3",), "t3": ("k4", "k5")}
TAIL = 60  # of the trace that a failure shows
STANDS_STILL = 10_000  # turns of the loop in which time passes


class Machine:
    """A disk, and the processes that write there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Process] = []
        self.is_detached = False


class World:
    """Everything, from one seed."""

    def __init__(self, seed: int, *, machines: int = 2) -> None:
        self.seed = seed
        self.dice = random.Random(seed)
        self.loop = VirtualLoop()
        self.context = copy_context()
        self.model = SqlModel()
        self.model.on_notify = self._ring
        self.trouble = Trouble()
        self.is_down = False
        self.is_healed = False  # nothing more befalls
        self.begins = MIDNIGHT - self.dice.choice((3600, 40, 15, -20))
        self.opened: dict[str, UsageRecord] = {}
        self.reached: dict[str, tuple[int, int]] = {}  # tokens and nanousd, by the last progress
        self.closed: dict[str, UsageRecord] = {}
        self.refused = 0
        self.calls = 0
        self.broken: BaseException | None = None
        self.trace: deque[tuple[Any, ...]] = deque(maxlen=TAIL)
        self.receipts: list[Receipt] = []
        self._folder = tempfile.TemporaryDirectory(dir=DISKS if Path(DISKS).is_dir() else None)
        self.machines = []
        for number in range(machines):
            folder = Path(self._folder.name) / f"disk-{number}"
            folder.mkdir()
            self.machines.append(Machine(folder))
        self._starts = 0
        self.died: dict[str, float] = {}  # processes that were killed, and when by the database's time
        self._standing = 0  # turns of the loop since time last passed
        self._grant: tuple[str, float] | None = None
        self._refused_since: dict[tuple[str, str], float] = {}
        self._graveyard: list[Any] = []
        self.db_trouble_at = -1e9
        self.found_at: float | None = None  # when an owner first told that the last failover was found
        self.model.on_grant = self._check_grant

    @property
    def now(self) -> float:
        """The database's time; unix seconds."""
        return self.begins + self.loop.elapsed

    def living(self) -> list[Process]:
        """Processes that are not dead."""
        return [process for machine in self.machines for process in machine.processes]

    def note(self, *what: Any) -> None:
        """Write down what happens."""
        self.trace.append((round(self.loop.elapsed, 4), *what))

    # -- what befalls

    def start(self, machine: Machine, skew: float = 0.0) -> Process:
        """Start a process."""
        self._starts += 1
        process = Process(self, machine, f"p{self._starts:03}", skew)
        self.note("start", process.name, machine.folder.name, skew)
        machine.processes.append(process)
        process.start()
        return process

    def crash(self, process: Process) -> None:
        """Kill a process."""
        self.note("crash", process.name)
        self.died[process.name] = self.now
        process.machine.processes.remove(process)
        process.crash()
        self._graveyard.append((process, [task for task in asyncio.all_tasks(self.loop) if not task.done()]))

    def gone(self, process: Process) -> None:
        """A process has left in order."""
        self.note("left", process.name)
        process.crash()
        process.machine.processes.remove(process)
        self._graveyard.append(process)

    def fail_over(self, statements: int) -> None:
        """Promote a replica that lacks the last statements."""
        statements = min(statements, len(self.receipts))
        self.model.server = self.now
        self.found_at = None
        self.note("failover", statements)
        self.db_trouble_at = self.loop.elapsed
        self.model.forget(statements)
        for _ in range(statements):
            receipt = self.receipts.pop()
            receipt.was_forgotten = True
            if receipt.was_heard:
                self.unsure(receipt.owner)

    def unsure(self, owner: str) -> None:
        """An owner was told something that the database has forgotten."""
        for process in self.living():
            if process.name == owner:
                process.is_unsure = True
                process.forgotten += 1

    def told_again(self, process: Process, forgotten: int) -> None:
        """A process has told its leases again, knowing of so many things that the database had forgotten."""
        if process.forgotten == forgotten:
            process.is_unsure = False

    # -- statements

    def run(self, owner: str, verb: str, statement: Callable[[SqlModel, float], Any]) -> tuple[Any, Receipt]:
        """Execute a statement, and check what it did."""
        self._grant = None
        answer = statement(self.model, self.now)
        self.note(owner, verb, answer)
        receipt = Receipt(owner)
        self.receipts.append(receipt)
        if len(self.receipts) > 100:
            del self.receipts[:50]
        self._guard(lambda: invariants.check_statement(self.model, verb))
        self._guard(lambda: self._check_rooms(owner))
        return answer, receipt

    def run_again(self, owner: str, verb: str, statement: Callable[[SqlModel, float], Any]) -> None:
        """Execute it a second time: nothing more may come of it."""
        self.run(owner, verb + " again" if verb != "take" else verb, statement)
        self._guard(lambda: invariants.check_again(self.model, verb))

    async def watch(self) -> None:
        """Look ten times a second for room that nobody uses and nobody else can have."""
        idle: dict[Idle, tuple[float, int]] = {}
        while True:
            await asyncio.sleep(0.1)
            try:
                idle = invariants.check_idle(self, idle)
            except Broken as exc:
                self.note("BROKEN", str(exc))
                self.broken = self.broken or exc

    def _check_rooms(self, owner: str) -> None:
        process = next((one for one in self.living() if one.name == owner), None)
        if process is None or process.is_unsure:
            return
        leases, _ = invariants.changes(self.model)
        for _, scope, unit, day in leases:
            pair = process.leases.rooms.by_day.get(_days(day), {}).get(scope)
            if pair is not None:
                invariants.check_room(process, pair[unit == NANOUSD])

    def _check_grant(self, owner: str, needs: list[Need], amounts: list[int], day: str, share: float) -> None:
        self._guard(lambda: invariants.check_grant(self.model, owner, needs, amounts, day, share))
        if any(amounts):
            self._guard(lambda: invariants.check_recovery(self.model, self.found_at, self.now))

    def take(self, take: Callable[[], Any], day: str, clock: float) -> Any:
        """Draw room, and check whose clock opens a day."""
        had = any(period == day for _, _, period in self.model.balances)
        taken = take()
        if any(period == day for _, _, period in self.model.balances):
            self._guard(lambda: invariants.check_opening(had, clock, self.now))
        return taken

    def _guard(self, check: Callable[[], None]) -> None:
        if self.broken is None:
            try:
                check()
            except Broken as exc:
                self.note("BROKEN", str(exc))
                self.broken = exc

    def _ring(self, scope: str) -> None:
        for process in self.living():
            if not process.line.is_cut and self.dice.random() < 0.95:
                self.loop.call_later(0.001, process.hear_bell, scope, context=process.context)

    # -- calls

    def admitted(self, process: Process, request: HoldRequest) -> None:
        """A call may begin."""
        self._refused_since.pop((process.name, request.scopes[1].name), None)
        if process.is_unsure:
            return
        held = process.leases.holding.calls.get(request.request_id)
        if held is not None:
            for pair in held.rooms:
                for room in pair:
                    self._guard(partial(invariants.check_room, process, room))

    def waited(self, process: Process, request: HoldRequest, refused: RefusedHold | None, since: float) -> None:
        """(7): A caller has waited for room, perhaps in vain."""
        now = self.loop.elapsed
        quiet = self.is_quiet(process, now - 6)
        most = WAIT_FOR_ROOM + 2 * ASK_AGAIN + (0.05 if quiet else 2 * ASK_WITHIN + 0.1)
        if self.trouble.slow_back:  # and asks follow each other the slower
            most = max(most, LEAST_ASKS * (LONGEST_PACE + 0.06) + 0.1)
        if now - since > most and process.went_on_at < since:
            self._guard(lambda: _raise(7, f"a caller of {process.name} waited for {now - since:.2f} s"))
        which = process.name, request.scopes[1].name
        if refused is None:
            return
        self.note("refused", process.name, request.request_id, refused)
        if not quiet or not self._has_headroom(request) or self.model._is_recovering(self.now):
            self._refused_since.pop(which, None)
        elif now - self._refused_since.setdefault(which, now) > 2:
            self._guard(lambda: _raise(7, f"{which} is refused for two seconds beside headroom: {refused}"))

    def is_quiet(self, process: Process, since: float) -> bool:
        """Whether nothing has befallen the database or any process since then."""
        return (
            not self.is_down
            and self.db_trouble_at < since
            and all(
                one.line.trouble_at < since
                and one.went_on_at < since
                and not one.line.is_cut
                and not one.life.is_frozen
                and one.has_begun
                for one in self.living()
            )
            and process.leases.may_ask
        )

    def answers(self, process: Process, since: float) -> bool:
        """Whether nothing has befallen this process, or its way to the database, since then."""
        return (
            not self.is_down
            and self.db_trouble_at < since
            and process.line.trouble_at < since
            and process.went_on_at < since
            and process.has_begun
            and process.leases.may_ask
            and not (process.line.is_cut or process.life.is_frozen or process.is_unsure)
        )

    def _has_headroom(self, request: HoldRequest) -> bool:
        day = day_text(day_of(request.request_id))
        for scope in request.scopes:
            for unit, wanted in ((TOKENS, request.tokens), (NANOUSD, request.cost_nanousd)):
                idle = 0
                for process in self.living():
                    pair = process.leases.rooms.by_day.get(_days(day), {}).get(scope.name)
                    if pair is not None:
                        room = pair[unit == NANOUSD]
                        lease = self.model.leases.get((process.name, scope.name, unit, day))
                        if lease is not None:
                            idle += max(0, lease.granted - lease.returned - room.used - room.held)
                for key in self.model.keys_of(scope.name, unit, day):
                    balance = self.model.balances.get(key)
                    if balance is not None and balance.cap is not None and wanted > balance.left + idle:
                        return False
        return True

    # -- the whole

    def play(self, story: Any) -> None:
        """Run the story to its end, or to the first invariant that breaks."""
        asyncio.events._set_running_loop(self.loop)
        task = self.loop.create_task(story)
        try:
            while not task.done() and self.broken is None:
                self._step()
        finally:
            self._end(task)
        if self.broken is None and task.exception() is not None:
            self.broken = task.exception()
        if self.broken is not None:
            tail = "\n".join(" ".join(map(str, one)) for one in self.trace)
            raise AssertionError(f"seed {self.seed}: {self.broken}\n{tail}") from self.broken

    def _step(self) -> None:
        before = self.loop.elapsed
        self.loop._run_once()  # type: ignore[attr-defined]
        self._standing = self._standing + 1 if self.loop.elapsed == before else 0
        if self._standing > STANDS_STILL:
            self.broken = Broken(7, "something goes round and round, and no time passes")

    def _end(self, story: asyncio.Task[None]) -> None:
        for process in self.living():
            process.crash()
        asyncio.events._set_running_loop(None)
        self._folder.cleanup()


def _raise(number: int, what: str) -> None:
    raise Broken(number, what)


def _days(day: str) -> int:
    found = _NUMBERS.get(day)
    if found is None:
        found = _NUMBERS[day] = (date.fromisoformat(day) - EPOCH).days
    return found


_NUMBERS: dict[str, int] = {}
