# What the step loop has to do with other engines: it holds the blocks of prompts that they read, and requests whose
# blocks come from them wait here, in no queue of the scheduler. Whatever does not come in time is computed.

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from gpu_backend.kv_transfer.seam import Described, Ended, Freed, KvTransfer
from gpu_backend.scheduling.scheduler import Scheduler
from gpu_backend.step.messages import Generate
from gpu_backend.step.sequence import Sequence
from gpu_backend.step.transfer import HeldBlocks

log = logging.getLogger("gpu_backend")

MOST_HELD = 0.5  # of the blocks, for other engines
MOST_COMING = 0.25  # of the blocks, from other engines, at once; one prompt alone may need more
MOST_WAITING = 256  # requests whose blocks come; more are computed
MOST_LOGGED = 50  # different problems, each once: counters have the rest

Ready = tuple[Generate, list[Sequence]]


@dataclass(slots=True)
class _Coming:
    """A request whose prompt's blocks come from another engine, from the block ``first`` on."""

    command: Generate
    leader: Sequence
    replies: list[Sequence]  # the caller's: those that were aborted are gone
    until: float  # clock reading
    first: int
    num_offered: int = 0  # 0: it is not known yet
    is_given_up: bool = False
    is_begun: bool = False


class Transfers:
    """Owns the blocks of ``scheduler.tables.apart``. No block is taken back before ``transfer`` is done with it."""

    def __init__(
        self, transfer: KvTransfer, scheduler: Scheduler, clock: Callable[[], float], pull_seconds: float
    ) -> None:
        self._transfer = transfer
        self._scheduler = scheduler
        self._clock = clock
        self._pull_seconds = pull_seconds
        self._held: dict[str, int] = {}  # blocks by lease, the oldest first; those that are ending are not in it
        self._coming: dict[int, _Coming] = {}  # by ticket
        self._tickets = count(1)
        self._counts: Counter[str] = Counter()
        self._problems: set[str] = set()

    def has_work(self) -> bool:
        """Whether requests wait here, or blocks are to be taken back."""
        return bool(self._coming) or self._transfer.has_news()

    def hold(self, sequence: Sequence) -> HeldBlocks | None:
        """Keep the prompt's blocks of a sequence that ends now, if that was asked for; say where they are."""
        request = sequence.request
        if not (isinstance(request, Generate) and request.holds_blocks) or sequence.reply_index:
            return None
        blocks = self._scheduler.blocks
        most = int(MOST_HELD * blocks.num_blocks)
        table = sequence.block_table[: min(sequence.num_prompt // blocks.block_size, most)]
        if not table or request.adapter is not None:  # numbers of adapters are each engine's own
            return None
        while self._held and sum(self._held.values()) + len(table) > most:
            self.end_oldest_lease()
        lease = secrets.token_hex(16)
        blocks.hold(table)
        self._scheduler.tables.apart[lease] = table
        self._held[lease] = len(table)
        self._counts["kv_blocks_offered"] += len(table)
        keys = sequence.block_hashes[: len(table)]
        where = self._transfer.register(
            lease,
            self._scheduler.tables.salt_of(sequence),
            list(zip(table, keys, strict=True)),
            sequence.cached_tokens or 0,
        )
        return HeldBlocks(where, table)

    def add(self, command: Generate, replies: list[Sequence]) -> bool:
        """Let a request wait for its blocks; False if it has nothing to wait for."""
        leader = replies[0]
        if command.remote is None or command.adapter is not None or leader.unscored_from is not None:
            return False
        tables, blocks = self._scheduler.tables, self._scheduler.blocks
        tables.extend_hashes(leader)
        # Of the last token there must be logits.
        hashes = leader.block_hashes[: (leader.num_prompt - 1) // blocks.block_size]
        first = blocks.count_known(hashes, 0)
        if first == len(hashes) or len(self._coming) >= MOST_WAITING:
            return False
        ticket = next(self._tickets)
        self._coming[ticket] = _Coming(command, leader, replies, self._clock() + self._pull_seconds, first)
        self._transfer.describe(ticket, command.remote, tables.salt_of(leader), hashes[first:])
        return True

    def advance(self, patience: float) -> list[Ready]:
        """Give room to what comes, take back what is done; return the requests that wait no longer.

        Waits at most ``patience`` seconds for something to happen.
        """
        ready: list[Ready] = []
        for event in self._transfer.poll(patience):
            match event:
                case Freed(lease):
                    self._take_back(lease)
                    self._held.pop(lease, None)
                case Described(ticket, num_blocks):
                    self._coming[ticket].num_offered = num_blocks
                case Ended():
                    ready += self._finish(event)
        now = self._clock()
        for ticket, coming in self._coming.items():
            if now >= coming.until or not coming.replies:
                self._give_up(ticket, coming)
                if coming.replies and ticket not in self._scheduler.tables.apart:
                    # Its thread may be held up by a connection that does not come about, or not have begun.
                    ready.append((coming.command, coming.replies))
                    coming.replies = []
            elif coming.num_offered and ticket not in self._scheduler.tables.apart and not coming.is_given_up:
                self._make_room(ticket, coming)
        return ready

    def begin_pulls(self) -> None:
        """Let blocks come into their room. After a launch: the device may have to copy out what was there."""
        for ticket, coming in self._coming.items():
            if coming.is_begun or coming.is_given_up:
                continue
            if (table := self._scheduler.tables.apart.get(ticket)) is not None:
                coming.is_begun = True
                self._transfer.pull(ticket, table[coming.first :])

    def end_oldest_lease(self) -> None:
        """End the oldest lease: its blocks are needed here, and what they hold can be computed elsewhere."""
        if self._held:
            lease = next(iter(self._held))
            del self._held[lease]
            self._transfer.release(lease)

    def end_leases(self) -> None:
        """End all leases; their blocks are free once no other engine reads them any more."""
        while self._held:
            self.end_oldest_lease()

    def counters(self) -> dict[str, float]:
        """Return what the load report says of transfers."""
        apart = self._scheduler.tables.apart
        held = sum(len(table) for name, table in apart.items() if isinstance(name, str))
        names = ("kv_blocks_offered", "kv_blocks_pulled", "kv_blocks_shared", "kv_pulls", "kv_pulls_failed")
        now = {"kv_blocks_held": float(held), "kv_pulls_waiting": float(len(self._coming))}
        return {**now, **{name: float(self._counts[name]) for name in names}}

    def close(self) -> None:
        """Serve and bring no more."""
        self._transfer.close()

    def _give_up(self, ticket: int, coming: _Coming) -> None:
        if not coming.is_given_up:
            coming.is_given_up = True
            self._transfer.release(ticket)

    def _make_room(self, ticket: int, coming: _Coming) -> None:
        """Give the blocks of a prompt room, if there is some that nothing else needs first."""
        scheduler, blocks, leader = self._scheduler, self._scheduler.blocks, coming.leader
        tables = scheduler.tables.apart
        needed = coming.first + coming.num_offered
        others = sum(len(table) for name, table in tables.items() if isinstance(name, int))
        if others and others + needed > MOST_COMING * blocks.num_blocks:
            return
        headroom = len(scheduler.running) + (scheduler.admission.headroom if leader.tier == "batch" else 0)
        allocation = blocks.allocate_table(leader.block_hashes[: coming.first], needed, headroom, leader.tenant)
        if allocation is None:
            return
        tables[ticket] = allocation.block_table
        if allocation.num_cached < coming.first:  # evicted since: what would come leads on from nothing
            self._give_up(ticket, coming)

    def _finish(self, ended: Ended) -> list[Ready]:
        """Let what came be found, as if it had been computed here, and its request go on."""
        coming = self._coming.pop(ended.ticket)
        self._counts["kv_pulls"] += 1
        self._counts["kv_pulls_failed"] += ended.problem is not None
        self._log(ended.problem)
        self._counts["kv_blocks_pulled"] += ended.num_blocks
        self._counts["kv_blocks_shared"] += ended.num_shared
        if ended.ticket in self._scheduler.tables.apart:
            end = coming.first + ended.num_blocks
            self._scheduler.tables.publish_pulled(coming.leader, ended.ticket, coming.first, end)
            self._take_back(ended.ticket)
            self._note_cached(coming, end)
        return [(coming.command, coming.replies)] if coming.replies else []

    def _log(self, problem: str | None) -> None:
        if problem is not None and problem not in self._problems and len(self._problems) < MOST_LOGGED:
            self._problems.add(problem)
            log.warning("KV blocks of another engine did not come, so they are computed: %s", problem)

    def _note_cached(self, coming: _Coming, end: int) -> None:
        """Tell as cached what neither engine had to compute: the other one's part is told by its own answer."""
        remote, size = coming.command.remote, self._scheduler.blocks.block_size
        if end > coming.first and remote is not None and coming.leader in coming.replies:
            coming.leader.cached_tokens = max(coming.first * size, min(remote.cached_tokens, end * size))

    def _take_back(self, name: str | int) -> None:
        self._scheduler.blocks.release(self._scheduler.tables.apart.pop(name))
        self._scheduler.admission.reconsider()
