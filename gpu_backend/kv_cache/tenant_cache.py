# Whose cached block is given away: no tenant's share may be flushed by another, however much the other sends. Within a
# tenant the eviction order decides.

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from gpu_backend.kv_cache.eviction import EvictionOrder

IDLE_SECONDS = 600.0  # four of five reuses come sooner (Wang et al. 2025, arXiv 2506.02634)
TENTHS = 10  # weights count in tenths, so that levels are whole numbers; 0.1 is the least


@dataclass(slots=True)
class _Tenant:
    """One tenant's unused cached blocks."""

    name: str
    weight: int = 0  # tenths; 0: idle
    seen: float = 0.0  # clock reading of its last request
    floor: int = 0  # blocks that others cannot take
    order: EvictionOrder = field(default_factory=EvictionOrder)

    @property
    def level(self) -> int:
        """Blocks for each unit of weight."""
        return len(self.order) * TENTHS // self.weight


class TenantCache:
    """The unused, findable blocks of one memory, by tenant.

    The next to lose a block is the tenant with the most of them for its weight, so active tenants' parts even out. Of
    ``num_protected`` blocks each active tenant's part, by weight and less one block, cannot be taken by others at all,
    not even for running sequences. A tenant without a request for ten minutes is idle: it has no part, and its blocks
    go first.

    Tenants of one level are kept together, so that the highest is at hand: every move is O(1), but for a tenant that
    becomes active or idle, which changes every tenant's part.
    """

    def __init__(self, num_protected: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_protected = num_protected
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self._active: OrderedDict[str, _Tenant] = OrderedDict()  # longest without a request first
        self._idle: dict[str, _Tenant] = {}  # those with blocks
        self._by_level: dict[int, dict[str, _Tenant]] = {}  # active ones with blocks
        self._highest = 0  # no level is above it
        self._floor_level = 0  # active tenants below it lose nothing to others
        self._size = 0
        self._kept = 0  # blocks within their tenant's floor

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[bytes]:
        for tenant in self._tenants.values():
            yield from tenant.order

    def available_to(self, name: str) -> int:
        """How many blocks ``evict_for`` can give that tenant."""
        tenant = self._tenants.get(name)
        return self._size - self._kept + (min(tenant.floor, len(tenant.order)) if tenant else 0)

    def touch(self, name: str, weight: float) -> None:
        """Note a request of a tenant: it is active from now on, with that weight."""
        now = self._clock()
        tenant = self._tenant(name)
        tenant.seen = now
        tenths = max(1, round(weight * TENTHS))
        if tenant.weight != tenths:
            self._change_weight(tenant, tenths)
        self._active.move_to_end(name)
        while (oldest := next(iter(self._active.values()))).seen < now - IDLE_SECONDS:
            self._change_weight(oldest, 0)

    def add(self, name: str, blocks: Iterable[tuple[bytes, bool]]) -> None:
        """Keep blocks that fell out of use: their keys, and whether each ever came back."""
        tenant = self._tenant(name)
        self._take_out(tenant)
        for key, again in blocks:
            tenant.order.add(key, again)
        self._put_in(tenant)

    def remove(self, name: str, keys: Iterable[bytes]) -> None:
        """Take blocks out that are used again, or must not be found any more."""
        tenant = self._tenants[name]
        self._take_out(tenant)
        for key in keys:
            tenant.order.remove(key)
        self._put_in(tenant)

    def evict_for(self, name: str, count: int) -> list[bytes]:
        """Choose ``count`` blocks to give away for a tenant, possibly its own. ``available_to`` must cover them.

        A victim loses up to a sixteenth of its blocks before the next is chosen.
        """
        keys: list[bytes] = []
        while len(keys) < count:
            tenant = self._victim(name)
            surplus = len(tenant.order) - (0 if tenant.name == name else tenant.floor)
            self._take_out(tenant)
            keys += tenant.order.evict(min(count - len(keys), surplus, 1 + len(tenant.order) // 16))
            self._put_in(tenant)
        return keys

    def recall(self, name: str, key: bytes) -> bool:
        """Whether a key that had to be computed was here not long ago."""
        tenant = self._tenants.get(name)
        return tenant is not None and tenant.order.recall(key)

    def check(self) -> None:
        """Assert that the counts and levels are what the tenants say."""
        with_blocks = [tenant for tenant in self._tenants.values() if tenant.order]
        assert self._size == sum(len(tenant.order) for tenant in with_blocks), "the size is wrong"
        assert self._kept == sum(min(len(t.order), t.floor) for t in with_blocks), "the kept blocks are miscounted"
        assert {t.name for t in with_blocks if not t.weight} == self._idle.keys(), "a tenant is wrongly idle"
        levels = {(level, name) for level, tenants in self._by_level.items() for name in tenants}
        assert levels == {(t.level, t.name) for t in with_blocks if t.weight}, "a tenant is on a wrong level"
        assert all(level <= self._highest for level in self._by_level), "a level is above the highest"
        assert sum(tenant.floor for tenant in self._active.values()) <= self._num_protected, "too much is kept"

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name)
        return tenant

    def _victim(self, name: str) -> _Tenant:
        if self._idle:
            return next(iter(self._idle.values()))
        while self._highest not in self._by_level:
            self._highest -= 1
        if self._highest >= self._floor_level:
            return next(iter(self._by_level[self._highest].values()))
        return self._tenants[name]

    def _take_out(self, tenant: _Tenant) -> None:
        """Take a tenant out of the accounting before its blocks, weight or floor change."""
        if not tenant.order:
            return
        self._size -= len(tenant.order)
        self._kept -= min(len(tenant.order), tenant.floor)
        if not tenant.weight:
            del self._idle[tenant.name]
            return
        level = tenant.level
        tenants = self._by_level[level]
        del tenants[tenant.name]
        if not tenants:
            del self._by_level[level]

    def _put_in(self, tenant: _Tenant) -> None:
        """Put it back into the accounting as it is now."""
        if not tenant.order:
            if not tenant.weight:
                del self._tenants[tenant.name]
            return
        self._size += len(tenant.order)
        self._kept += min(len(tenant.order), tenant.floor)
        if not tenant.weight:
            self._idle[tenant.name] = tenant
            return
        level = tenant.level
        self._by_level.setdefault(level, {})[tenant.name] = tenant
        self._highest = max(self._highest, level)

    def _change_weight(self, tenant: _Tenant, weight: int) -> None:
        for other in {**self._active, tenant.name: tenant}.values():
            self._take_out(other)
        tenant.weight = weight
        if weight:
            self._active[tenant.name] = tenant
        else:
            del self._active[tenant.name]
        total = sum(other.weight for other in self._active.values())
        self._floor_level = self._num_protected * TENTHS // total if total else 0
        for other in {**self._active, tenant.name: tenant}.values():
            other.floor = max(0, (self._floor_level * other.weight - 1) // TENTHS)
            self._put_in(other)
