# Slots of targets, and the calls that wait for one: bounded queues per team and fair turns; and parts of them that are
# reserved for teams, which others borrow while they are free. Pure: time is an argument, in monotonic seconds, and
# freeing a slot returns the calls whose turn it is.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from gateway.overload.fair_queue import FairQueue, Share

FIRST_GUESS = 1.0  # seconds that a call holds its slot, before any has ended
SMOOTHING = 0.1  # the weight of the latest call in what is typical
LEAST = 0.001  # seconds that a slot counts as held at the least: a team whose turns cost nothing would take them all
OVERTIME_EVERY = 0.25  # seconds between charges for calls that run longer than is typical
MOST_BYTES = 64 * 2**20  # of the requests of one team that wait: twice the longest
LAGS = {"high": 0.0, "normal": 0.25, "low": 0.5}  # of the longest wait: how far a priority puts a call back
AGES_AFTER = 0.5  # of the longest wait: once a batch call has waited so long,
EVERY = 4  # the batch tier gets a turn after so many interactive ones


@dataclass(slots=True, eq=False)
class Slot:
    """Leave for one call to be at a target. Give it back once, with ``SlotQueues.release``."""

    pool: SlotPool
    queue: FairQueue[QueuedCall]
    share: Share[QueuedCall]
    since: float
    charged: float  # seconds
    owner: str | None = None  # the team, if it counts against a part that is reserved for it


@dataclass(slots=True, eq=False)
class QueuedCall:
    """One call that waits in its team's queue, for a slot of any of ``pools``."""

    team: str
    weight: float
    is_batch: bool
    since: float
    lag: float  # seconds that its priority puts it back in its team's queue
    pools: tuple[SlotPool, ...]
    size: int = 0  # bytes of its request
    by_own_key: Collection[SlotPool] = ()  # of these, those that it asks with its team's own key
    slot: Slot | None = None  # once it was its turn
    is_waiting: bool = True

    @property
    def rank(self) -> float:
        """Its place in its team's queue: lower goes first."""
        return self.since + self.lag


class SlotPool:
    """One target's slots: which calls hold them, and which wait for one."""

    def __init__(self, name: str, limit: int | None) -> None:
        self.name = name
        self.limit = limit  # slots; None: as many as are asked for
        self.is_resting = False  # it said that it takes none for a while with the deployment's key
        self.is_full = False  # it said that more waits there than keeps it busy, or that it takes none,
        self.state = ""  # and why: an engine of our own is "starting", "sleeping" or "draining"
        self.held: dict[Slot, None] = {}
        self.reserved: Mapping[str, float] = {}  # teams' parts of what it runs at once: interactive calls have them
        self.capacity = 0  # that it runs at once, from all senders; 0: not known
        self.has_queue = False  # our own engine: a call beyond its slots waits inside it, for the next that ends
        self.takes_blocks = True  # our own engine: it reads what another one computed of a prompt,
        self.adapters: Collection[str] = ()  # but for these models
        self._owned = Counter[str]()  # slots that teams hold of their parts
        self.typical = FIRST_GUESS  # seconds that a call holds its slot
        self.interactive = FairQueue[QueuedCall]()
        self.batch = FairQueue[QueuedCall]()
        self._since_batch = 0  # interactive turns since the last one of the batch tier, while that waits
        self._overtime_at = -math.inf

    @property
    def has_room(self) -> bool:
        """Whether fewer slots are held than there are."""
        return self.limit is None or len(self.held) < self.limit

    @property
    def has_free(self) -> bool:
        """Whether a slot is free. While a target rests the calls that wait for it go first."""
        return self.has_room and not (self.is_resting and self.has_waiting)

    def has_free_for(self, team: str, is_batch: bool) -> bool:
        """Whether a slot is free, or others have borrowed one that is the team's: then a call goes to an engine all the
        same, which has the next place for it."""
        return self.has_free or (not is_batch and self._lends and self._is_owed(team))

    @property
    def has_waiting(self) -> bool:
        """Whether a call waits."""
        return bool(self.interactive.calls or self.batch.calls)

    def queue_of(self, is_batch: bool) -> FairQueue[QueuedCall]:
        """Return the queue of a tier."""
        return self.batch if is_batch else self.interactive

    def give(self, team: str, weight: float, is_batch: bool, now: float) -> Slot:
        """Give one of the free slots to a call."""
        queue = self.batch if is_batch else self.interactive
        share = queue.share_of(team, weight)
        queue.begin(share, self.typical)
        owner = team if team in self.reserved and not is_batch else None
        slot = Slot(self, queue, share, now, self.typical, owner)
        self.held[slot] = None
        if owner is not None:
            self._owned[owner] += 1
        return slot

    def take_back(self, slot: Slot, now: float) -> bool:
        """Free a slot and charge what it was used for; return whether it was held."""
        if slot not in self.held:
            return False
        del self.held[slot]
        if slot.owner is not None:
            self._owned[slot.owner] -= 1
        used = max(LEAST, now - slot.since)
        slot.queue.correct(slot.share, used - slot.charged)
        self.typical += SMOOTHING * (used - self.typical)
        return True

    def next_call(self, now: float, ages_after: float) -> QueuedCall | None:
        """Return the call whose turn it is, if a slot is free and a call waits; teams that are owed one go first."""
        if not self.has_waiting or not (self.has_room or self._lends):
            return None
        if self.is_resting:
            return self._first_by_own_key()
        owed = [team for team in self.reserved if self._is_owed(team)]
        if owed and (call := self.interactive.first(owed)) is not None:
            return call
        if not self.has_free:
            return None
        self._charge_overtime(now)
        normal, patient = self.interactive.first(), self.batch.first()
        if normal is None or patient is None:
            self._since_batch = 0
            return normal or patient
        oldest = next(iter(self.batch.calls))
        if self._since_batch >= EVERY and now >= oldest.since + ages_after:
            self._since_batch = 0
            return patient
        self._since_batch += 1
        return normal

    def wait_expected(self, team: str, weight: float, is_batch: bool) -> float:
        """Return about how many seconds one more call of a team would wait here."""
        if not self.limit:
            return math.inf if self.limit == 0 else 0.0
        queue = self.queue_of(is_batch)
        turns = (queue.count(team) + 1) / queue.fraction_of(team, weight)
        return turns * self.typical / self.limit

    def _first_by_own_key(self) -> QueuedCall | None:
        """Return the call whose turn it is while the deployment's key rests: of those with their team's own."""
        for queue in (self.interactive, self.batch):
            if (call := queue.first_of(call for call in queue.calls if self in call.by_own_key)) is not None:
                return call
        return None

    @property
    def _lends(self) -> bool:
        """Whether a team has its part of it at once, also where others hold that."""
        return self.has_queue and bool(self.reserved) and bool(self.limit) and not self.is_resting

    def _is_owed(self, team: str) -> bool:
        part = self.reserved.get(team)
        return part is not None and self._owned[team] < math.ceil(part * self.capacity - 1e-9)

    def _charge_overtime(self, now: float) -> None:
        if now < self._overtime_at:
            return
        self._overtime_at = now + OVERTIME_EVERY
        for slot in self.held:
            if (over := now - slot.since - slot.charged) > 0:
                slot.queue.correct(slot.share, over)
                slot.charged += over


class SlotQueues:
    """The slots of all targets, and every call that waits for one of them.

    No call waits while a slot that would do is free, so a call that finds a free slot overtakes none.
    """

    def __init__(self, per_team: int, wait: float) -> None:
        self.waiting = Counter[str]()  # calls, by team
        self.bytes_waiting = Counter[str]()  # of their requests
        self._per_team = per_team
        self._wait = wait  # seconds

    def follow(self, per_team: int, wait: float) -> None:
        """Go by other bounds from the next call on; ``wait`` in seconds."""
        self._per_team, self._wait = per_team, wait

    def join(
        self,
        team: str,
        weight: float,
        is_batch: bool,
        priority: str,
        pools: Iterable[SlotPool],
        now: float,
        size: int = 0,
        by_own_key: Collection[SlotPool] = (),
    ) -> QueuedCall | None:
        """Let a call wait for the first slot of ``pools``, all of them full; ``None`` when its team's queue is.

        ``size``: bytes of its request, which wait in memory. ``by_own_key``: pools at which it waits for a slot alone,
        and for no rest of the deployment's key.
        """
        if self.waiting[team] >= self._per_team or self.bytes_waiting[team] + size > MOST_BYTES:
            return None
        queued = QueuedCall(team, weight, is_batch, now, LAGS[priority] * self._wait, tuple(pools), size, by_own_key)
        for pool in queued.pools:
            pool.queue_of(is_batch).add(queued)
        self.waiting[team] += 1
        self.bytes_waiting[team] += size
        return queued

    def leave(self, queued: QueuedCall) -> None:
        """A call waits no longer: its client left, or its time is over, or its turn has come."""
        if not queued.is_waiting:
            return
        queued.is_waiting = False
        for pool in queued.pools:
            pool.queue_of(queued.is_batch).remove(queued)
        self.waiting[queued.team] -= 1
        self.bytes_waiting[queued.team] -= queued.size
        if not self.waiting[queued.team]:
            del self.waiting[queued.team], self.bytes_waiting[queued.team]

    def release(self, slot: Slot, now: float) -> list[QueuedCall]:
        """Give a slot back and return the calls whose turn it is now, slots in hand. Twice is once."""
        return self.fill(slot.pool, now) if slot.pool.take_back(slot, now) else []

    def resize(self, pool: SlotPool, limit: int | None, now: float) -> list[QueuedCall]:
        """Set how many slots there are and return the calls whose turn it is now. Running calls keep theirs."""
        pool.limit = limit
        return self.fill(pool, now)

    def fill(self, pool: SlotPool, now: float, most: float = math.inf) -> list[QueuedCall]:
        """Give what is free to waiting calls, ``most`` of them, and return them."""
        admitted: list[QueuedCall] = []
        while len(admitted) < most and (queued := pool.next_call(now, AGES_AFTER * self._wait)) is not None:
            # Still queued while it is charged: a waiting call is not brought forward.
            queued.slot = pool.give(queued.team, queued.weight, queued.is_batch, now)
            self.leave(queued)
            admitted.append(queued)
        return admitted

    def wait_expected(self, team: str, weight: float, is_batch: bool, pools: Iterable[SlotPool]) -> float:
        """Return about how many seconds one more call would wait, infinite when unknown."""
        return min((pool.wait_expected(team, weight, is_batch) for pool in pools), default=math.inf)
