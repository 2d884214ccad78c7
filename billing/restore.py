# Keeps the counters true when Redis may have lost something: looks at the epoch once a second and does what follows,
# be it to say what was not heard, to put back what only this process knows, or to begin a new epoch.

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog
from redis.asyncio import Redis

from billing.edges import Clock
from billing.epochs import DEADLINE, Epochs
from billing.flusher import Flusher
from billing.journal import Journal
from billing.next_move import FRESH, Move, next_move
from billing.quotas import Quotas
from billing.rebuild import LOAD_WITHIN, STILL, Rebuilder, nothing
from billing.rebuild_store import RebuildStore
from billing.store_errors import POSTGRES_AWAY, STORES_AWAY

LOOK_EVERY = 1.0  # seconds between looks at the epoch
LOOK_SOON = 0.05  # seconds after an alarm, doubled until LOOK_EVERY as long as it lasts
ASK_FOR_DEAD_EVERY = 10.0  # seconds between looks for owners that died with something unsaid
START_WITHIN = 2.0  # seconds that a starting house waits for its counters
LEAVE_WITHIN = 2.0  # seconds that an ending one waits for Redis to hear everything

# Alarms after which a new epoch has to begin, and why.
FAULTS = {
    "stale": "a team's books are of another epoch",
    "broken": "somebody wrote over a key of the counters",
    "late_journal": "a journal came so late that nobody knows whether its calls were settled",
    "unheard": "a booking was broken off, and nobody heard whether Postgres has it",
}

log = structlog.get_logger(__name__)


class Restorer:
    """The guard of one process's quotas."""

    def __init__(
        self,
        quotas: Quotas,
        journal: Journal,
        flusher: Flusher,
        store: RebuildStore,
        redis: Redis,
        clock: Clock,
        *,
        uses_server_time: bool = True,
        deadline: float = DEADLINE,
        still: float = STILL,
    ) -> None:
        self.owner = flusher.id
        self._quotas = quotas
        self._flusher = flusher
        self._store = store
        self._clock = clock
        self._epochs = Epochs(redis, clock, uses_server_time=uses_server_time, deadline=deadline)
        self._rebuilder = Rebuilder(quotas, journal, flusher, store, self._epochs, still=still)
        self._joined = FRESH
        self._put_back_in = ""
        self._fault = ""  # why a new epoch has to begin although this one seems in order
        self._wake = asyncio.Event()
        self._welcomes: dict[str, asyncio.Task[bool]] = {}
        self._dead_due = 0.0
        self._noting: asyncio.Task[None] | None = None
        self.rebuilt = 0  # epochs that this process made ready
        self._is_noted = False  # Postgres knows that we have something unsaid
        self._owing = 0  # bookings that are under way
        self._task: asyncio.Task[None] | None = None
        quotas.attach(self, store.scope_sums)

    async def start(self) -> None:
        """Begin to look; return when the quotas count in Redis, or after two seconds.

        To be awaited before anything is adopted, flushed or opened.
        """
        self._task = asyncio.create_task(self.run())
        await _until(lambda: not self._quotas.is_standalone, START_WITHIN)
        if self._joined == FRESH:
            self._joined = ""
        if self._quotas.is_standalone:
            log.warning("quotas_not_ready")

    async def stop(self) -> None:
        """Stop looking, and let nobody wait for this process any more; say what it leaves untold."""
        await _until(lambda: not self._quotas.unsaid, LEAVE_WITHIN)
        tasks = [task for task in (self._task, self._noting, *self._welcomes.values()) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=LEAVE_WITHIN)
        unsettled = self._quotas.unsaid + bool(self._fault)
        try:
            async with asyncio.timeout(LEAVE_WITHIN):
                if unsettled or self._flusher.is_behind:
                    await self._store.leave(self.owner, unsettled)
                else:
                    await self._store.forget(self.owner)
        except STORES_AWAY as exc:
            log.warning("owner_not_taken_off", error=repr(exc))
        await self._epochs.close()

    async def run(self) -> None:
        """Look once a second, and at once when the quotas raise the alarm, until cancelled."""
        pause = LOOK_SOON
        while True:
            try:
                await self.look_once()
            except STORES_AWAY as exc:
                log.info("epoch_not_seen", error=repr(exc))
            except Exception:
                log.exception("look_failed")
            pause = min(2 * pause, LOOK_EVERY) if self._quotas.is_standalone else LOOK_EVERY
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
                pause = LOOK_SOON / 2
            except TimeoutError:
                pass
            self._wake.clear()

    async def look_once(self) -> Move:
        """Look at the epoch and do what follows. Raises what Redis and Postgres raise."""
        seen = await self._epochs.look()
        run_id = await self._epochs.run_id()
        move, why = next_move(seen, self.owner, joined=self._joined, put_back_in=self._put_back_in, run_id=run_id)
        if move is Move.STAY and (why := await self._find_fault()):
            move = Move.START
        present = seen.epoch.id if seen.epoch else ""
        match move:
            case Move.JOIN:
                self._joined = present
                self._quotas.begin_epoch(present)
                await self._quotas.come_back()
            case Move.STAY:
                if self._quotas.epoch != present:  # we put back, and heard of it late
                    move = Move.START
                    await self._start(present, "an epoch began without us")
                elif self._quotas.is_standalone:
                    await self._quotas.come_back()
            case Move.PUT_BACK:
                self._put_back_in = present
                await self._rebuilder.put_back(present)
            case Move.START:
                await self._start(present, why)
        if self._is_noted and not self._owing and not self._quotas.is_standalone and not self._quotas.unsaid:
            await self._note(0)
        return move

    def alarm(self, reason: str) -> None:
        """Look at the epoch now; see to it that our death would not hide what Redis has yet to hear."""
        self._fault = FAULTS.get(reason, self._fault)
        self._wake.set()
        if reason == "redis_lost" and not self._is_noted and (self._noting is None or self._noting.done()):
            self._noting = asyncio.create_task(self._note_unsettled())

    async def welcome(self, team_id: str) -> bool:
        """Begin the books of a team that was made after the epoch. False when they were lost, or nobody can tell."""
        task = self._welcomes.get(team_id)
        if task is None:
            task = self._welcomes[team_id] = asyncio.create_task(self._welcome(team_id))
            task.add_done_callback(lambda _: self._welcomes.pop(team_id, None))
        return await asyncio.shield(task)

    @asynccontextmanager
    async def owing(self) -> AsyncIterator[None]:
        """Book in Postgres first and count after: should this process die inside, or not hear what Postgres did, a
        rebuild follows.

        Raises what Postgres raises.
        """
        self._owing += 1
        try:
            await self._note(max(1, self._quotas.unsaid))
            try:
                yield
            except (*POSTGRES_AWAY, asyncio.CancelledError):
                self.alarm("unheard")
                raise
        finally:
            self._owing -= 1

    async def _start(self, present: str, why: str) -> None:
        """Begin a new epoch and see it through, if it is our turn. Without Postgres there is no use in it."""
        await self._store.owners_alive()
        self._joined = ""
        self._fault = ""
        epoch = f"{int(self._clock.now() * 1000):x}-{secrets.token_hex(3)}"
        self.rebuilt += await self._rebuilder.lead(epoch, present, why)

    async def _find_fault(self) -> str:
        """Return why an epoch that seems in order has to be followed by another, or ""."""
        if self._fault:
            return self._fault
        if self._quotas.is_standalone or self._clock.monotonic() < self._dead_due:
            return ""
        self._dead_due = self._clock.monotonic() + ASK_FOR_DEAD_EVERY
        try:
            dead = await self._store.dead_with_unsettled()
        except STORES_AWAY:
            return ""  # nothing can be rebuilt now either
        return f"somebody died and left calls unsettled: {', '.join(dead)}" if dead else ""

    async def _welcome(self, team_id: str) -> bool:
        try:
            seen = await self._epochs.look()
            epoch = seen.epoch
            if epoch is None or not epoch.is_ready or epoch.id != self._quotas.epoch:
                return False
            created_at = await self._store.created_at(team_id)
            if created_at is not None and created_at <= epoch.read_at:
                await self._epochs.want(epoch.id, f"the books of {team_id} were lost")
                return False
            # A team made later began with nothing: all of its calls are told in this epoch.
            return await self._quotas.load(epoch.id, team_id, nothing(), seen.now + LOAD_WITHIN)
        except STORES_AWAY as exc:
            log.warning("books_not_begun", team_id=team_id, error=repr(exc))
            return False

    async def _note_unsettled(self) -> None:
        """Tell Postgres that Redis has something to hear of us, before a call held without Redis can be flushed."""
        async with self._flusher.paused():
            for _ in range(3):
                if not self._quotas.is_standalone:
                    return
                try:
                    await self._note(max(1, self._quotas.unsaid))
                    return
                except STORES_AWAY:  # then nothing can be flushed either
                    await asyncio.sleep(0.5)

    async def _note(self, unsettled: int) -> None:
        await self._store.note_unsettled(self.owner, unsettled)
        self._is_noted = unsettled > 0


async def _until(is_so: Callable[[], bool], seconds: float) -> None:
    """Wait until ``is_so``, but no longer than ``seconds``."""
    late = asyncio.get_running_loop().time() + seconds
    while True:
        if is_so() or asyncio.get_running_loop().time() >= late:
            return
        await asyncio.sleep(LOOK_SOON / 5)
