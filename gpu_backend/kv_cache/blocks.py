# Which sequence holds which block of the KV cache. Blocks are counted references; full blocks can be found again by the
# hash of everything before and in them, so that prompts with a common beginning share its blocks. Nothing here touches
# a device.

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import groupby, takewhile

from gpu_backend.kv_cache.block_log import BlockLog
from gpu_backend.kv_cache.block_pool import BlockPool, NamedBlock
from gpu_backend.step.plan import BlockCopy

SHARED = "(shared)"  # the owner of the blocks of declared beginnings; no team id has brackets


@dataclass(frozen=True, slots=True)
class Allocation:
    """A new block table; the first ``num_cached`` blocks already hold their tokens' keys and values."""

    block_table: tuple[int, ...]
    num_cached: int


class BlockManager:
    """Hands out ``num_blocks`` blocks, counts their users, and remembers what full ones hold.

    A block is in one of three states: in use (referenced), evictable (unused, but found by its hash until the room is
    needed) or free. ``num_protected`` blocks are kept, by weight, for what tenants have cached: no other tenant's
    work takes them. Blocks whose hash is in ``shared`` belong to no tenant.

    What is evicted goes to one of ``num_host_blocks`` in host memory, and comes back when its hash is asked for. The
    copies that this takes must be made in their order, before the next step computes: ``take_copies`` hands them out.

    What can be found from now on, and what no more, is noted in ``log``, if there is one.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_protected: int = 0,
        shared: frozenset[bytes] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
        num_host_blocks: int = 0,
        log: BlockLog | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.shared = shared
        self.log = log
        # Leading tokens of each block that the draft model has computed too; what it computed is its owner's to know.
        self.num_drafted = [0] * num_blocks
        self._references = [0] * num_blocks
        self.device = BlockPool(num_blocks, num_protected, clock, "GPU", log)
        # A key is on the device or on the host, never on both; there nothing that has a name is in use.
        self.host = BlockPool(num_host_blocks, num_protected * num_host_blocks // num_blocks, clock, "CPU", log)
        self._copies: list[BlockCopy] = []

    @property
    def num_available(self) -> int:
        """Unused blocks: free and evictable ones."""
        return self.device.num_available

    @property
    def num_in_use(self) -> int:
        """Blocks that some sequence references."""
        return self.num_blocks - self.device.num_available

    def available_to(self, tenant: str) -> int:
        """Blocks that can be handed out to a tenant: all but those in use and those kept for others."""
        return self.device.available_to(tenant)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size)

    def count_known(self, hashes: SequenceOf[bytes], last: int) -> int:
        """Return how many leading hashes have blocks on the device or the host; ``last`` is what was found before.

        Only what changed since is looked at, so a gap that came in between goes unseen: a guide, and no promise.
        """
        device, host = self.device.by_key, self.host.by_key
        while last < len(hashes) and (hashes[last] in device or hashes[last] in host):
            last += 1
        while last and not (hashes[last - 1] in device or hashes[last - 1] in host):
            last -= 1
        return last

    def note_request(self, tenant: str, weight: float) -> None:
        """Tell that a tenant has work: until it has had none for ten minutes, its part of the cache is its own."""
        self.device.resting.touch(tenant, weight)
        if self.host.num_blocks:
            self.host.resting.touch(tenant, weight)

    def allocate_table(
        self, hashes: SequenceOf[bytes], num_blocks: int, headroom: int = 0, tenant: str = ""
    ) -> Allocation | None:
        """Make a table of ``num_blocks``, its beginning found by ``hashes`` where possible; None if there is no room.

        There is room if ``headroom`` blocks would still be available to the tenant afterwards.
        """
        device = self.device
        keys = self._known(hashes[:num_blocks])
        found = [device.by_key[key] for key in keys if key in device]
        resting = [named for named in found if self._references[named.block] == 0]
        device.wake(resting)
        if device.available_to(tenant) - (num_blocks - len(found)) < headroom:
            device.rest(reversed(resting))
            return None
        for named in found:
            self._references[named.block] += 1
            named.again = True
        if keys and keys[0] in self.shared:
            self.note_request(SHARED, 1.0)
        on_host = self.host.withdraw([self.host.by_key[key] for key in keys if key not in device])
        fresh = self._take(num_blocks - len(found), tenant)
        for there, block in zip(on_host, fresh, strict=False):
            self._copies.append(BlockCopy(there.block, block, to_host=False))
            device.resting.recall(there.tenant, there.key)
            device.name(there.key, block, there.tenant, again=True)
        self.host.free([there.block for there in on_host])
        table = [device.by_key[key].block for key in keys]
        return Allocation((*table, *fresh[len(on_host) :]), len(keys))

    def allocate_block(self, tenant: str = "") -> int | None:
        """Hand out one more block; None if none is available to the tenant."""
        return self._take(1, tenant)[0] if self.available_to(tenant) else None

    def publish(self, block: int, block_hash: bytes, tenant: str = "") -> None:
        """Let others find a full, computed block by its hash; of two equal ones that in use stays known."""
        device = self.device
        if block in device.by_block:
            return
        known = device.by_key.get(block_hash)
        if known is not None:
            if self._references[known.block]:
                return
            device.drop([known])
        owner = SHARED if block_hash in self.shared else tenant
        again = device.resting.recall(owner, block_hash) or known is not None
        if self.host.num_blocks:
            again = self.host.resting.recall(owner, block_hash) or again
            if block_hash in self.host:  # what came before it was not, so it could not be used
                self.host.drop([self.host.by_key[block_hash]])
                again = True
        device.name(block_hash, block, owner, again)

    def hold(self, block_table: SequenceOf[int]) -> None:
        """Take one more reference to blocks that are in use."""
        for block in block_table:
            assert self._references[block], "a block is held that nothing uses"
            self._references[block] += 1

    def release(self, block_table: SequenceOf[int]) -> None:
        """Give a table's references back. Its end is evicted before its beginning, which more prompts share."""
        resting = []
        for block in reversed(block_table):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was released more often than it was taken"
            if self._references[block] == 0:
                named = self.device.by_block.get(block)
                if named is None:
                    self.device.free((block,))
                else:
                    resting.append(named)
        self.device.rest(resting)

    def forget(self, block_table: SequenceOf[int]) -> None:
        """Drop these blocks from the prefix cache: what they hold cannot be trusted. Call it before ``release``."""
        for block in block_table:
            if block in self.device.by_block:
                self.device.forget(self.device.by_block[block])

    def clear(self) -> None:
        """Forget all that is cached, on the device and on the host. Nothing may be in use."""
        assert not self.num_in_use, "a block is in use"
        for pool in (self.device, self.host):
            pool.drop(pool.by_key.values())
        self._copies.clear()

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Return the copies that are to be made, in this order, before anything else is computed."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def invalidate_copies(self, copies: Iterable[BlockCopy]) -> None:
        """Drop from the prefix cache what these copies may not have brought."""
        for copy in copies:
            pool = self.host if copy.to_host else self.device
            if (named := pool.by_block.get(copy.target)) is None:
                continue
            if copy.to_host or not self._references[copy.target]:
                pool.drop([named])
            else:
                pool.forget(named)

    def swap_out(self, block_table: SequenceOf[int], tenant: str = "") -> tuple[int, ...] | None:
        """Release a table, copied to host blocks, which are returned; None, and nothing done, without room.

        What no other sequence uses is not found until it comes back: else its eviction would copy it once more.
        """
        if self.host.available_to(tenant) < len(block_table):
            return None
        held, _ = self.host.take(len(block_table), tenant)
        self.forget([b for b in block_table if self._references[b] == 1 and self._belongs_to_tenant(b)])
        self._copies += [BlockCopy(*pair, to_host=True) for pair in zip(block_table, held, strict=True)]
        self.release(block_table)
        return tuple(held)

    def swap_in(
        self, held: SequenceOf[int], headroom: int = 0, tenant: str = "", fresh: int = 0
    ) -> tuple[int, ...] | None:
        """Make a table of what was swapped out, with ``fresh`` blocks after it, and free its host blocks.

        None, and nothing done, without room.
        """
        if self.available_to(tenant) - len(held) - fresh < headroom:
            return None
        table = self._take(len(held) + fresh, tenant)
        self._copies += [BlockCopy(*pair, to_host=False) for pair in zip(held, table, strict=False)]
        self.host.free(held)
        return tuple(table)

    def check(self, block_tables: Iterable[SequenceOf[int]], swapped: Iterable[SequenceOf[int]] = ()) -> None:
        """Assert that the accounting adds up, and that exactly these tables are out, on the device and on the host."""
        on_host = [block for held_blocks in swapped for block in held_blocks]
        self.host.check(on_host)
        assert self.host.by_block.keys().isdisjoint(on_host), "a block of a sequence on the host can be found"
        assert self.host.by_key.keys().isdisjoint(self.device.by_key), "a key is on the device and on the host"
        held = Counter(block for table in block_tables for block in table)
        assert all(self._references[block] == held[block] for block in range(self.num_blocks)), "references differ"
        self.device.check(held)

    def _belongs_to_tenant(self, block: int) -> bool:
        named = self.device.by_block.get(block)
        return named is not None and named.tenant != SHARED

    def _known(self, hashes: SequenceOf[bytes]) -> list[bytes]:
        """Return the leading hashes whose blocks are on the device or the host."""
        return list(takewhile(lambda key: key in self.device or key in self.host, hashes))

    def _take(self, count: int, tenant: str) -> list[int]:
        taken, evicted = self.device.take(count, tenant)
        if self.host.num_blocks:
            self._send_to_host(evicted)
        for block in taken:
            self._references[block] = 1
            self.num_drafted[block] = 0
        return taken

    def _send_to_host(self, evicted: list[NamedBlock]) -> None:
        """Keep evicted blocks there; where there is not room for all of a tenant's, the last of them."""
        host = self.host
        for tenant, group in groupby(evicted, lambda named: named.tenant):
            own = list(group)
            kept = own[max(0, len(own) - host.available_to(tenant)) :]
            places, _ = host.take(len(kept), tenant)
            host.rest(
                [
                    host.name(one.key, place, tenant, one.again or host.resting.recall(tenant, one.key))
                    for one, place in zip(kept, places, strict=True)
                ]
            )
            self._copies += [BlockCopy(one.block, place, True) for one, place in zip(kept, places, strict=True)]
