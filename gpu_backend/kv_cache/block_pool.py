# The blocks of one memory, the device's or the host's behind it: free ones, named ones, which can be found by a key,
# and those that are handed out. Only the accounting; the runner copies.

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

from gpu_backend.kv_cache.block_log import BlockLog
from gpu_backend.kv_cache.tenant_cache import TenantCache
from gpu_backend.step.block_events import Medium


@dataclass(slots=True)
class NamedBlock:
    """A full block that can be found by its key."""

    key: bytes
    block: int
    tenant: str
    again: bool  # whether its key ever came back


class BlockPool:
    """``num_blocks`` blocks. Named ones that nothing uses are ``resting``: they go when no other is free.

    Of ``num_protected`` blocks each tenant has a part that no other's work takes. What can be found from now on, and
    what no more, is noted in ``log``, if there is one.
    """

    def __init__(
        self,
        num_blocks: int,
        num_protected: int,
        clock: Callable[[], float],
        medium: Medium,
        log: BlockLog | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.resting = TenantCache(num_protected, clock)
        self.by_key: dict[bytes, NamedBlock] = {}
        self.by_block: dict[int, NamedBlock] = {}
        self._free = deque(range(num_blocks))
        self._medium = medium
        self._log = log

    def __contains__(self, key: bytes) -> bool:
        return key in self.by_key

    @property
    def num_available(self) -> int:
        """Blocks that nothing uses: free and resting ones."""
        return len(self._free) + len(self.resting)

    def available_to(self, tenant: str) -> int:
        """Blocks that can be handed out to a tenant: all but those in use and those kept for others."""
        return len(self._free) + self.resting.available_to(tenant)

    def take(self, count: int, tenant: str) -> tuple[list[int], list[NamedBlock]]:
        """Hand out blocks, at the resting ones' cost; return which, and what is found no more. ``available_to`` must
        cover them."""
        taken = [self._free.popleft() for _ in range(min(count, len(self._free)))]
        evicted = [self.by_key[key] for key in self.resting.evict_for(tenant, count - len(taken))]
        for named in evicted:
            self.forget(named)
            taken.append(named.block)
        return taken, evicted

    def free(self, blocks: Iterable[int]) -> None:
        """Take blocks back that have no name."""
        self._free.extend(blocks)

    def name(self, key: bytes, block: int, tenant: str, again: bool) -> NamedBlock:
        """Let a block be found by its key."""
        named = self.by_key[key] = self.by_block[block] = NamedBlock(key, block, tenant, again)
        if self._log is not None:
            self._log.add(key, self._medium)
        return named

    def forget(self, named: NamedBlock) -> None:
        """Let a block be found no more, in use or not."""
        del self.by_key[named.key], self.by_block[named.block]
        if self._log is not None:
            self._log.remove(named.key, self._medium)

    def rest(self, some: Iterable[NamedBlock]) -> None:
        """Keep named blocks that fell out of use."""
        for tenant, group in groupby(some, _owner):
            self.resting.add(tenant, [(named.key, named.again) for named in group])

    def wake(self, some: Iterable[NamedBlock]) -> None:
        """Take resting blocks out, which keep their names."""
        for tenant, group in groupby(some, _owner):
            self.resting.remove(tenant, [named.key for named in group])

    def withdraw(self, some: Iterable[NamedBlock]) -> list[NamedBlock]:
        """Take resting blocks out, with their names; they are the caller's until ``free``."""
        withdrawn = list(some)
        self.wake(withdrawn)
        for named in withdrawn:
            self.forget(named)
        return withdrawn

    def drop(self, some: Iterable[NamedBlock]) -> None:
        """Free resting blocks: what they hold is not needed, or cannot be trusted."""
        self.free([named.block for named in self.withdraw(some)])

    def check(self, held: Iterable[int]) -> None:
        """Assert that the accounting adds up, and that exactly these blocks are handed out."""
        self.resting.check()
        resting = [self.by_key[key].block for key in self.resting]
        everything = sorted([*self._free, *resting, *held])
        assert everything == list(range(self.num_blocks)), "a block is lost, or in two states"
        assert self.by_block.keys().isdisjoint(self._free), "a free block can be found"
        named = {(named.key, named.block) for named in self.by_key.values()}
        assert named == {(named.key, block) for block, named in self.by_block.items()}, "the two indexes differ"
        assert len(named) == len(self.by_key), "two keys have one block"


def _owner(named: NamedBlock) -> str:
    return named.tenant
