# KV blocks in host memory: what the device had to give away, until it or its room is needed. Only the accounting;
# the runner copies.

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import groupby

from gpu_backend.kv_cache.block_log import BlockLog
from gpu_backend.kv_cache.tenant_cache import TenantCache


@dataclass(frozen=True, slots=True)
class HostBlock:
    """A block in host memory that can be found by its key."""

    block: int
    tenant: str


class HostTier:
    """``num_blocks`` blocks in host memory: cached ones, by key and tenant, ones held for a sequence, and free ones.

    A key is on the device or here, never on both. Tenants' parts are protected as on the device.
    """

    def __init__(
        self, num_blocks: int, num_protected: int, clock: Callable[[], float], log: BlockLog | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self._log = log
        self._free = deque(range(num_blocks))
        self._cached = TenantCache(num_protected, clock)
        self._by_key: dict[bytes, HostBlock] = {}
        self._key_of: dict[int, bytes] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their key."""
        return len(self._cached)

    def note_request(self, tenant: str, weight: float) -> None:
        """Tell that a tenant has work."""
        self._cached.touch(tenant, weight)

    def keep(self, tenant: str, blocks: SequenceOf[tuple[bytes, bool]]) -> list[int]:
        """Reserve blocks for those that the device evicts: keys, and whether each ever came back.

        Returns where they go, in their order; where there is not room for all, for the last of them.
        """
        count = min(len(blocks), len(self._free) + self._cached.available_to(tenant))
        kept = blocks[len(blocks) - count :]
        places = self._take_places(count, tenant)
        self._cached.add(tenant, [(key, again or self._cached.recall(tenant, key)) for key, again in kept])
        for (key, _), place in zip(kept, places, strict=True):
            self._by_key[key] = HostBlock(place, tenant)
            self._key_of[place] = key
            if self._log is not None:
                self._log.add(key, "CPU")
        return places

    def take(self, keys: Iterable[bytes]) -> list[HostBlock]:
        """Take cached blocks out; they are the caller's until ``free``."""
        taken = []
        for tenant, group in groupby(keys, lambda key: self._by_key[key].tenant):
            own = list(group)
            self._cached.remove(tenant, own)
            taken += [self._pop(key) for key in own]
        for found in taken:
            del self._key_of[found.block]
        return taken

    def recall(self, tenant: str, key: bytes) -> bool:
        """Whether a key that had to be computed was here not long ago."""
        return self._cached.recall(tenant, key)

    def reserve(self, count: int, tenant: str) -> list[int] | None:
        """Hand out blocks for what is no cache, at the cached ones' cost; None if there are not that many."""
        if len(self._free) + self._cached.available_to(tenant) < count:
            return None
        return self._take_places(count, tenant)

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back."""
        self._free.extend(blocks)

    def forget(self, block: int) -> None:
        """Drop a block from the cache, if it is there: what it holds cannot be trusted."""
        if block in self._key_of:
            self.take([self._key_of[block]])
            self._free.append(block)

    def clear(self) -> None:
        """Drop all that is cached."""
        for block in list(self._key_of):
            self.forget(block)

    def check(self, held: Iterable[int]) -> None:
        """Assert that the accounting adds up, and that exactly these blocks are held for sequences."""
        self._cached.check()
        out = list(held)
        assert sorted(self._cached) == sorted(self._by_key), "not all cached blocks can be found, or more"
        assert {found.block: key for key, found in self._by_key.items()} == self._key_of, "the two indexes differ"
        everything = sorted([*self._free, *self._key_of, *out])
        assert everything == list(range(self.num_blocks)), "a host block is lost, or in two places"

    def _take_places(self, count: int, tenant: str) -> list[int]:
        taken = [self._free.popleft() for _ in range(min(count, len(self._free)))]
        for key in self._cached.evict_for(tenant, count - len(taken)):
            place = self._pop(key).block
            del self._key_of[place]
            taken.append(place)
        return taken

    def _pop(self, key: bytes) -> HostBlock:
        if self._log is not None:
            self._log.remove(key, "CPU")
        return self._by_key.pop(key)
