# Where calls wait for their turn: before anything is held for them, when every target of their route is full. The rules
# stand in slots.py; here are the event loop, the clock, and the refusal.

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace

from gateway.calls.call import Call
from gateway.calls.unanswered import names_for
from gateway.core.clock import Clock
from gateway.core.settings import QueueSettings
from gateway.overload.placement import Placement
from gateway.overload.slots import QueuedCall, Slot, SlotPool, SlotQueues
from gateway.telemetry.meters import counter_of, histogram_of
from gateway.telemetry.metrics import Metrics
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.resilience.breakers import Breakers
from gateway.upstreams.resilience.keys import TargetAway
from gateway.upstreams.wire.errors import LONGEST_TOLD
from protocol.errors import Overloaded
from router.catalog.targets import HEALTHY, Route, Target, TargetHealth, Tier
from router.replicas import VersionShare, by_beginning, by_version

PACE = 0.05  # seconds between the turns at a target that has just rested: all at once would be its next 429
FULL = TargetHealth(is_full=True)
ONE_VERSION: Mapping[str, VersionShare] = {}


class SlotGrant(Struct, frozen=True):
    """Leave to go along a route. Its first target is the one where ``slot`` is held, if its slots are counted."""

    route: Route
    slot: Slot | None = None
    waited: float = 0.0  # seconds


class TargetLimiter:
    """Every target's slots as this process hands them out, and the calls that wait for one."""

    def __init__(
        self,
        registry: ProviderRegistry,
        targets: Iterable[Target],
        breakers: Breakers,
        queue: QueueSettings,
        clock: Clock,
        metrics: Metrics,
        placement: Placement | None = None,
        versions: Mapping[str, VersionShare] = ONE_VERSION,
    ) -> None:
        """``versions``: pools, by their providers, that have replicas of a new version."""
        self._placement, self._versions = placement or Placement(), versions
        self._registry = registry
        self._breakers = breakers
        self._queue = queue
        self._clock = clock
        self._metrics = metrics
        self._queues = SlotQueues(queue.per_team, queue.wait)
        self._futures: dict[QueuedCall, asyncio.Future[None]] = {}
        self._pools: dict[str, SlotPool] = {}  # by Target.key; a target that is missing has no limit
        self._targets: dict[SlotPool, Target] = {}  # one of each pool's
        self._peers: dict[str, tuple[str, str]] = {}  # of our own engines, by Target.key: the model, and where it is
        self.engines: dict[str, SlotPool] = {}  # of these, by address: our own, which say themselves what they take
        self._full: dict[str, TargetHealth] = {}  # of these, those that say they are full
        self.follow(registry, targets, queue)

    def follow(self, registry: ProviderRegistry, targets: Iterable[Target], queue: QueueSettings) -> None:
        """Go by another configuration. Who holds or awaits a slot of a target that it lacks goes on as before."""
        self._registry, self._queue = registry, queue
        self._queues.follow(queue.per_team, queue.wait)
        known, self._pools = self._pools, {}
        engines, self.engines = self.engines, {}
        self._targets, self._peers = {}, {}
        for target in targets:
            provider, pool = registry.settings(target.model.provider), known.get(target.key)
            if provider.self_hosted and len(provider.endpoints) > 1:
                self._peers[target.key] = (target.model.name, target.endpoint.region)
            if provider.concurrency is not None:
                pool = pool if pool is not None and pool.name == target.key else SlotPool(target.key, None)
                self.resize(pool, provider.concurrency, capacity=provider.concurrency)
            elif provider.self_hosted:  # one engine, whatever names its model has
                address = target.endpoint.base_url
                pool = self.engines.setdefault(address, engines.get(address) or SlotPool(address, None))
                pool.has_queue = True
            else:
                if pool is not None:
                    self.resize(pool, None)
                continue
            pool.reserved = provider.reserved
            self._pools[target.key] = pool
            self._targets.setdefault(pool, target)
        self._placement.keep(self.engines)
        self._note_full()

    def enter(self, call: Call, route: Route, health: Mapping[str, TargetHealth]) -> SlotGrant | None:
        """Return leave to go at once, to the first target with a free slot; ``None`` when the call has to wait."""
        if not self._pools:
            return SlotGrant(route)
        able = self._shared(self._able(route, health), call)
        lent: Target | None = None  # where the call's team has a place that another has borrowed
        for target in able:
            if lent is not None and not self._are_peers(lent, target):
                break
            pool = self._pools.get(target.key)
            if pool is None:
                return SlotGrant(_beginning_with(target, route))
            if not _is_free(pool, call, target):
                continue
            if pool.has_room:
                return SlotGrant(_beginning_with(target, route), self._give(pool, call, target))
            lent = lent or target  # another replica may have one that is free
        if lent is not None:
            return SlotGrant(_beginning_with(lent, route), self._give(self._pools[lent.key], call, lent))
        return None if able else SlotGrant(route)

    def can_wait(self, route: Route) -> bool:
        """Whether a call none of whose targets may be asked can wait for one that said when it takes calls again."""
        return bool(self._queue.per_team and self._resting(route))

    async def wait(self, call: Call, route: Route, health: Mapping[str, TargetHealth]) -> SlotGrant:
        """Return leave to go once it is the call's turn at a target of its route, all of which are full.

        Raises Overloaded when its team's queue is full, or when the wait is over. A call that is cancelled gives its
        place up at once.
        """
        able = self._able(route, health)
        if health:
            able += self._resting(route)
        targets = {self._pools[target.key]: target for target in reversed(able)}
        team, is_batch = call.caller.team, call.routing.tier is Tier.BATCH
        began = self._clock.monotonic()
        expected = self._queues.wait_expected(team.id, team.weight, is_batch, targets)
        if call.placing.starts_within < expected < math.inf:  # infinite: not known, as while an engine starts
            raise self._shed(call, route, targets, "late")
        by_own_key = {pool for pool, target in targets.items() if target.own is not None}
        queued = self._queues.join(team.id, team.weight, is_batch, call.priority, targets, began, call.size, by_own_key)
        if queued is None:
            raise self._shed(call, route, targets, "queue_full")
        loop = asyncio.get_running_loop()
        future = self._futures[queued] = loop.create_future()
        timer = loop.call_later(self._patience_of(call, route, began), self._give_up, queued)
        outcome = "left"
        try:
            await future
            outcome = "expired" if queued.slot is None else "turn"
        except BaseException:
            self._queues.leave(queued)
            self.release(queued.slot)  # its turn came in the very moment in which its client left
            raise
        finally:
            timer.cancel()
            del self._futures[queued]
            waited = self._clock.monotonic() - began
            labels = route.targets[0].model.name, call.routing.tier.value, outcome
            histogram_of(self._metrics.queue_wait, *labels).observe(waited)
        if queued.slot is None:
            raise self._shed(call, route, targets, "expired")
        target = targets[queued.slot.pool]
        self._place(queued.slot, call, target)
        return SlotGrant(_beginning_with(target, route), queued.slot, waited)

    def take(self, call: Call, target: Target, *, goes_on: bool = False) -> Slot | None:
        """Return a slot for another attempt, or ``None`` where none is needed. Raises TargetAway when all are held.

        A reply that ``goes_on`` here is there in part and cannot wait: it gets a slot beyond them.
        """
        pool = self._pools.get(target.key)
        if pool is None:
            return None
        if not goes_on and not _is_free(pool, call, target):
            raise TargetAway(1.0, "all of its slots are taken", is_busy=False)
        return self._give(pool, call, target)

    def is_full(self, target: Target) -> bool:
        """Whether all slots of a target are held."""
        pool = self._pools.get(target.key)
        return pool is not None and not (pool.has_free if target.own is None else pool.has_room)

    def release(self, slot: Slot | None) -> None:
        """Give a slot back, if there is one; the call whose turn it is then goes on. Twice is once."""
        if slot is not None:
            now = self._clock.monotonic()
            self._placement.end(slot, now)
            if slot.pool.has_waiting and (target := self._targets.get(slot.pool)) is not None:
                self._let_rest(target)
            self._wake(self._queues.release(slot, now))

    def header_for(self, call: Call, target: Target) -> str:
        """Return what a replica that tells what it has cached is told of a call's prompt."""
        return self._placement.header_for(call.request, call.cached_as, target)

    def prompt_at(self, call: Call, target: Target) -> tuple[int, int] | None:
        """Return the characters of a call's prompt, and how many of them a target tells that it has cached; ``None``
        where the target tells that it computes the prompt itself, whatever another replica has."""
        pool = self._pools.get(target.key)
        if pool is not None and (not pool.takes_blocks or target.model.upstream_model in pool.adapters):
            return None
        return self._placement.found_at(call.request, call.cached_as, target)

    def note_first_token(self, slot: Slot) -> float | None:
        """Note that the prompt of the call that holds a slot is computed. Return the share of it that was expected to
        be cached, where its replica tells."""
        return self._placement.note_first_token(slot, self._clock.monotonic())

    def slow_replicas(self) -> Mapping[str, float]:
        """Return the addresses of replicas whose first tokens come late, and how many times as late as their peers'."""
        return self._placement.slow(self._clock.monotonic())

    def health(self) -> Mapping[str, TargetHealth]:
        """Return our own engines that say they are full, by ``Target.key``."""
        return self._full

    def resize(self, pool: SlotPool, slots: int | None, *, is_full: bool = False, capacity: int = 0) -> None:
        """Say how many slots a target has from now on; ``None``: as many as are asked for.

        ``is_full``: whether it says that it has more to do than it needs, from any sender. ``capacity``: calls that it
        runs at once; 0: not known.
        """
        pool.capacity = capacity
        if is_full != pool.is_full:
            pool.is_full = is_full
            self._note_full()
        if slots != pool.limit:
            self._wake(self._queues.resize(pool, slots, self._clock.monotonic()))

    def slot_pools(self) -> Iterable[SlotPool]:
        """Return every target's slots that are counted."""
        return dict.fromkeys(self._pools.values())

    def _note_full(self) -> None:
        self._full = {key: FULL for key, pool in self._pools.items() if pool.is_full}

    def _able(self, route: Route, health: Mapping[str, TargetHealth]) -> tuple[Target, ...]:
        """Return the targets that may be asked: those that are well, else those that are not wholly away."""
        if not health:
            return route.targets
        well = tuple(target for target in route.targets if not health.get(target.key, HEALTHY).is_open)
        return well or tuple(target for target in route.targets if self._breakers.why_away(target) is None)

    def _shared(self, targets: tuple[Target, ...], call: Call) -> tuple[Target, ...]:
        """Return the targets in their order, but replicas of our own engine as the call's beginning and loads say."""
        if not self._peers:
            return targets
        ordered: list[Target] = []
        for (place, _), run in groupby(targets, lambda target: (self._peers.get(target.key), target.key in self._full)):
            replicas = list(run)
            new = self._versions.get(replicas[0].model.provider) if place is not None else None
            for part in [replicas] if new is None else by_version(replicas, new, call.draw):
                ordered += self._by_work(part, call) if place is not None and len(part) > 1 else part
            if call.placing.addresses and place is not None:
                ordered[-len(replicas) :] = _wanted_first(ordered[-len(replicas) :], call.placing.addresses)
        return tuple(ordered)

    def _are_peers(self, one: Target, other: Target) -> bool:
        """Whether two targets are replicas of one model at one place."""
        place = self._peers.get(one.key)
        return place is not None and place == self._peers.get(other.key)

    def _by_work(self, replicas: list[Target], call: Call) -> list[Target]:
        loads = [len(self._pools[replica.key].held) for replica in replicas]
        homes = by_beginning(replicas, call.beginning, loads, self._placement.slow_beside(replicas[0]))
        is_told = self._placement.tells(*homes)
        return self._placement.by_work(homes, call.request, call.cached_as) if is_told else homes

    def _resting(self, route: Route) -> tuple[Target, ...]:
        """Return the targets that take calls again, by what they said, before the wait of any call is over."""
        return tuple(target for target in route.targets if self._let_rest(target))

    def _let_rest(self, target: Target) -> bool:
        """Give out no slot of a target that rests for less than a wait, until then; return whether it does."""
        if target.own is not None:
            return False  # its team's own limit: the calls of all others go on
        pool, away = self._pools.get(target.key), self._breakers.why_away(target)
        if away is None or not away.is_limit or away.retry_in > self._queue.wait:
            return False
        if pool is None:
            pool = self._pools[target.key] = SlotPool(target.key, None)
            self._targets[pool] = target
        if not pool.is_resting:
            pool.is_resting = True
            asyncio.get_running_loop().call_later(away.retry_in, self._after_rest, target, pool)
        return True

    def _after_rest(self, target: Target, pool: SlotPool) -> None:
        """Let waiting calls go to a target that takes calls again, one after the other."""
        pool.is_resting = False
        if self._let_rest(target):
            return  # the first of them was told to wait again
        self._wake(self._queues.fill(pool, self._clock.monotonic(), most=1))
        if pool.has_waiting:
            pool.is_resting = True
            asyncio.get_running_loop().call_later(PACE, self._after_rest, target, pool)

    def _give(self, pool: SlotPool, call: Call, target: Target) -> Slot:
        team = call.caller.team
        slot = pool.give(team.id, team.weight, call.routing.tier is Tier.BATCH, self._clock.monotonic())
        self._place(slot, call, target)
        return slot

    def _place(self, slot: Slot, call: Call, target: Target) -> None:
        if target.key in self._peers:
            now = self._clock.monotonic()
            self._placement.begin(slot, target, call.request, call.cached_as, now, call.size, call.priority)

    def _wake(self, admitted: Iterable[QueuedCall]) -> None:
        for queued in admitted:
            if not (future := self._futures[queued]).done():
                future.set_result(None)

    def _give_up(self, queued: QueuedCall) -> None:
        if queued.is_waiting:
            self._queues.leave(queued)
            if not (future := self._futures[queued]).done():
                future.set_result(None)

    def _patience_of(self, call: Call, route: Route, now: float) -> float:
        total = self._registry.settings_at(route.targets[0]).timeouts.total
        return max(0.0, min(self._queue.wait, call.started + min(total, call.placing.starts_within) - now))

    def _shed(self, call: Call, route: Route, pools: Collection[SlotPool], why: str) -> Overloaded:
        team, tier = call.caller.team, call.routing.tier
        counter_of(self._metrics.shed, route.targets[0].model.name, tier.value, why).inc()
        expected = self._queues.wait_expected(team.id, team.weight, tier is Tier.BATCH, pools)
        wait = math.ceil(min(max(1.0, expected), LONGEST_TOLD))
        happened = {
            "queue_full": "and as many of this team's requests, or as many bytes of them, as may wait for it do so",
            "expired": f"and no place became free within {min(self._queue.wait, call.placing.starts_within):g} s",
            "late": f"and no place is expected within {call.placing.starts_within:g} s, in which it should begin",
        }
        states = {pool.state or "busy" for pool in pools}
        busy = f"Every target of {names_for(call, route.targets)} is {' or '.join(sorted(states))}"
        return Overloaded(f"{busy}, {happened[why]}. Try again later.", retry_after=wait)


def _is_free(pool: SlotPool, call: Call, target: Target) -> bool:
    """Whether a call may go to a target at once. With its team's own key it waits for no rest of the deployment's."""
    if target.own is not None and pool.has_room:
        return True
    return pool.has_free_for(call.caller.team.id, call.routing.tier is Tier.BATCH)


def _wanted_first(replicas: list[Target], addresses: tuple[str, ...]) -> list[Target]:
    """Return replicas with those at these addresses before the others, in the order of the addresses."""
    rank = {address: place for place, address in enumerate(addresses)}
    return sorted(replicas, key=lambda each: rank.get(urlsplit(each.endpoint.base_url).netloc, len(rank)))


def _beginning_with(first: Target, route: Route) -> Route:
    """Return the route with ``first`` moved to its beginning."""
    if first is route.targets[0]:
        return route
    others = (target for target in route.targets if target is not first)
    return replace(route, targets=(first, *others), reason=route.reason_at(first))
