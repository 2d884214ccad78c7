# One process as the database knows it: an owner of leases, from the start to the end of its journal. It says once a
# second that it lives, whatever the number of teams; it notices when the database has forgotten what it acknowledged;
# and it ends dead owners whose journals it has carried to the ledger.

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import structlog

from billing.core.edges import Clock
from billing.core.store_errors import POSTGRES_AWAY, told_if_away
from billing.journal.journal import Journal
from billing.journal.owner_files import OWNER, bury, claim, dead, ended, note_told
from billing.quotas.lease_store import Beat
from billing.quotas.leases import Leases
from billing.quotas.standing import GIVE_UP_AFTER
from billing.upkeep.flusher import Flusher
from protocol.serving.deadlines import running_timeout

EVERY = 1.0  # seconds between beats
YOUNG = 30  # beats of a start in which each looks for dead owners
DEAD_EVERY = 10  # beats between looks for dead owners, and reports of how far the journal is carried
ANSWER_WITHIN = 2.0  # seconds without an answer to a beat, after which the database is taken for lost
START_WITHIN = 2.0  # seconds that a starting process waits for its first beat
LEAVE_WITHIN = 2.0  # seconds that an ending one waits until its leases are back
ASTRAY = 2.0  # seconds by which two clocks may differ
SILENT = 2.5  # seconds without a beat, in which a balance may have become tight unheard
AGAIN = 1.0  # seconds between tries to deliver again

log = structlog.get_logger(__name__)


class Owner:
    """The owner of one process's leases. ``start`` before anything is adopted, flushed or held."""

    def __init__(self, leases: Leases, flusher: Flusher, journal: Journal, clock: Clock, *, version: str = "") -> None:
        self.buried = 0  # dead owners that we ended
        self.recovered = 0  # times that the database was found to have forgotten something
        self.is_astray = False  # our clock and the database's differ: no new day is opened
        self._leases = leases
        self._flusher = flusher
        self._journal = journal
        self._store = leases.store
        self._clock = clock
        self._version = version
        self._claim: int | None = None  # our file in the journal folder, locked
        self._is_listed = False
        self._has_forgotten = False
        self._set_again_for: float | None = None  # the last failover that we have told our leases after
        self._synced: tuple[float, float] | None = None  # the database's time, and ours (monotonic) when it was told
        self._server: float | None = None  # the database that answered the last beat, by its start
        self._noted: float | None = None  # the one that knows what we know, as our file says
        self._beaten_at: float | None = None  # monotonic seconds; when a beat was last answered
        self._owes = False  # calls are to be delivered again
        self._delivering: asyncio.Task[None] | None = None
        self._beats = 0
        self._wake = asyncio.Event()
        self._leases.on_beat = self._acknowledged

    @property
    def id(self) -> str:
        """How the database knows us."""
        return self._leases.owner

    @property
    def _path(self) -> Path:
        return self._journal.directory / f"{self._journal.token}{OWNER}"

    async def start(self) -> None:
        """Claim our place in the journal folder, take over what dead processes left there, and beat for the first
        time."""
        self._leases.may_ask = False
        await self._flusher.adopt()
        try:
            async with running_timeout(START_WITHIN):
                await self.beat()
        except (*POSTGRES_AWAY, OSError) as exc:
            self._leases.is_away = True
            log.warning("leases_not_ready", error=repr(exc))

    async def run(self) -> None:
        """Beat once a second until cancelled."""
        loop = asyncio.get_running_loop()
        last, beating = loop.time(), None
        try:
            while True:
                beating, began = beating or asyncio.create_task(self._beat_in_time()), self._clock.monotonic()
                try:
                    async with running_timeout(ANSWER_WITHIN):
                        await asyncio.shield(beating)
                except POSTGRES_AWAY as exc:
                    self._leases.miss(began, exc)
                if beating.done():
                    beating = None
                now = loop.time()
                if self._synced is not None:  # before that nothing is drawn, and our own clock may be days off
                    self._leases.turn(max(0.1, now - last), self._now())
                last = now
                try:
                    async with asyncio.timeout(EVERY):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()
        finally:
            if beating is not None:
                beating.cancel()

    async def _beat_in_time(self) -> None:
        async with running_timeout(GIVE_UP_AFTER):
            await self.beat()

    async def beat(self) -> None:
        """Say that we live, and do what follows from the answer. Raises what the database raises."""
        if self._claim is None:
            self._claim, self._noted = claim(self._journal.directory, self._journal.token, self.id), None
        if not self._is_listed:
            await self._store.begin(self.id, self._version)
            self._is_listed = True
            log.info("owner_listed", owner=self.id)
        sent, now, oldest = self._leases.mark, self._clock.now(), self._journal.oldest
        watermark = now if oldest is None else min(now, oldest)
        beat = await self._store.beat(self.id, watermark, self._journal.backlog, self._leases.holds())
        if beat is None:
            self._begin_again()
            return
        self._leases.is_away = False
        self._follow_time(beat.now)
        self._leases.living = max(1, beat.living)
        self._leases.heard(sent, beat.beat)
        if self._server not in (None, beat.server):
            self._has_forgotten = True  # a replica, a backup, or only a restart: who can tell?
        self._server = beat.server
        if self._has_forgotten or beat.found_at not in (None, self._set_again_for):
            await self._recover(beat)
        self._note_told()
        self._leases.may_ask = True
        monotonic = self._clock.monotonic()
        if self._beaten_at is not None and monotonic - self._beaten_at > SILENT:
            self._leases.return_idle()
        self._beaten_at = monotonic
        if beat.tight:
            self._leases.recall(beat.tight)
        await self._leases.draws.read_again()
        await self._leases.take_tomorrow()
        self._beats += 1
        if self._beats < YOUNG or self._beats % DEAD_EVERY == 0:  # dead owners hold what a new start has to wait for
            await self.end_dead()
        if self._beats % DEAD_EVERY == 0 and not self.is_astray:
            self._journal.kept_files.prune()  # by a clock that was just set: one that is ahead would delete all of it

    async def end_dead(self) -> None:
        """End the owners of this folder that are dead and wholly in the ledger. Raises what the database raises."""
        for one in (*dead(self._journal.directory), *ended(self._journal.directory, self._now())):
            if one.server != self._server:
                self._owe()  # it died, or ended, in a database that may have known more than this one
            elif one.path.suffix == OWNER and one.is_carried:
                self.buried += await self._store.end(one.name)
                bury(one.path, self._now())

    async def stop(self) -> None:
        """Give everything back and end; what is not in the ledger yet keeps the owner listed until a neighbour carries
        it."""
        if self._delivering is not None:
            self._delivering.cancel()
        self._leases.leave()
        with told_if_away(log, "owner_not_ended"):
            async with running_timeout(LEAVE_WITHIN):
                await self._leases.returns.tell()
                await self._settle_forgotten()
                if self._journal.oldest is None and not self._leases.holding.calls and self._is_listed:
                    await self._store.end(self.id)
                    self._forget_claim()
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    async def _settle_forgotten(self) -> None:
        """Deliver again before we end, if the database forgot since our last beat: no neighbour may do it for us."""
        if not self._is_listed:
            return
        owes = self._owes or self._delivering is not None
        beat = await self._store.beat(self.id, self._clock.now(), self._journal.backlog)
        if owes or self._has_forgotten or beat is None or beat.server != self._server:
            await self._flusher.deliver_again()

    def _acknowledged(self, sent: int, beat: int) -> None:
        """Each statement of this process that commits counts one. A database that counts less than was acknowledged has
        forgotten."""
        if beat <= sent:
            self._has_forgotten = True
            self._wake.set()

    async def _recover(self, beat: Beat) -> None:
        """Tell a database that forgot what we know: our leases, and the calls of the last day again."""
        found, self._has_forgotten = self._has_forgotten, False
        found_at = beat.found_at
        try:
            if found:
                log.error("database_forgot", acknowledged=self._leases.acknowledged, beat=beat.beat)
                self.recovered += 1
                self._leases.count_from(beat.beat)
                self._owe()
                if found_at == self._set_again_for:  # no other owner has found it yet
                    found_at = await self._store.found_failover(found_at)
            await self._leases.returns.set_again()
            self._leases.return_idle()  # a balance may be tight as it was before: this database rings no bell for that
        except BaseException:
            self._has_forgotten = self._has_forgotten or found
            raise
        self._set_again_for = found_at

    def _owe(self) -> None:
        """Deliver the calls of the last day again, from the beginning: this database may lack some."""
        self._owes = True
        if self._delivering is None:
            self._delivering = asyncio.create_task(self._deliver_again())

    async def _deliver_again(self) -> None:
        """Write the calls of the last day again and end who was ended, however long it takes."""
        folder = self._journal.directory
        while self._owes:
            self._owes, server = False, self._server
            gone = (*dead(folder), *ended(folder, self._now()))  # who dies from now on is looked at again
            try:
                await self._flusher.deliver_again()
                for one in gone:
                    if one.path.suffix != OWNER:
                        await self._store.end(one.name)
                    if server is not None:
                        self._note(one.path, server)
            except POSTGRES_AWAY as exc:
                log.info("not_delivered_again", error=repr(exc))
                self._owes = True
                await asyncio.sleep(AGAIN)
        self._delivering = None

    def _note_told(self) -> None:
        """Write down which database knows everything of this process, as soon as one does."""
        if self._server is not None and self._server != self._noted and not self._owes and self._delivering is None:
            self._note(self._path, self._server)
            self._noted = self._server

    def _note(self, path: Path, server: float) -> None:
        try:
            note_told(path, server)
        except FileNotFoundError:
            pass  # a neighbour has ended it meanwhile, or removed it
        except OSError as exc:  # a day is delivered again, for nothing
            log.warning("server_not_noted", path=str(path), error=repr(exc))

    def _now(self) -> float:
        """Return the database's time, though our own clock may have been set since it was told."""
        if self._synced is None:
            return self._clock.now()
        told, monotonic = self._synced
        return told + self._clock.monotonic() - monotonic

    def _begin_again(self) -> None:
        """Begin as another owner: the database has ended this one, or a replica has never heard of it."""
        log.error("owner_ended", owner=self.id)
        self._has_forgotten = True
        self._forget_claim()
        self._journal.begin_again()
        self._leases.owner = owner_id(self._journal)
        self._leases.forget()
        self._is_listed = False
        self._wake.set()

    def _forget_claim(self) -> None:
        bury(self._path, self._now())
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def _follow_time(self, now: float) -> None:
        """Go by the database's time, unless it jumped and our own clock did not."""
        monotonic = self._clock.monotonic()
        ahead = now - self._clock.now()
        has_jumped = self._synced is not None and abs(now - self._synced[0] - (monotonic - self._synced[1])) > ASTRAY
        self.is_astray = has_jumped and abs(ahead) > ASTRAY
        if self.is_astray:
            log.error("clocks_differ", seconds=round(ahead, 3))
            return
        self._synced = now, monotonic
        self._clock.follow(self._clock.ahead + ahead)


def owner_id(journal: Journal) -> str:
    """Return how the database is to know the process that writes ``journal``."""
    return f"{socket.gethostname()}:{journal.token}"
