# How many calls our own engines can take, by their own reports: how many replies run, how many wait inside them, and
# how many they run at the most. The aim is a short queue inside the engine, enough that it never runs dry; calls
# beyond that wait here, where every replica can still take them. (Like TCP Vegas: Brakmo and Peterson, IEEE JSAC
# 13(8), 1995, section 4; but there the queue must be guessed, and here it is reported.) An engine that takes calls
# again says so as well: its breakers let probes through at once; and what each can do is learned on the way.

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping

import structlog

from gateway.core.clock import Clock
from gateway.fleet.instances import Replica, ask_load, replicas_of
from gateway.fleet.kv_events import KvEvents
from gateway.fleet.told_abilities import ToldAbilities
from gateway.inference.edition import Edition
from gateway.inference.limiter import TargetLimiter
from gateway.overload.slots import SlotPool
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.resilience.breakers import Breakers
from gateway.upstreams.wire.errors import UpstreamFailure
from protocol.serving.engine_load import EngineLoad

log = structlog.get_logger()

EVERY = 1.0  # seconds between looks at an engine that calls are at,
IDLE_EVERY = 10.0  # and at one that none is at
PART = 8  # an engine's queue is to be this part of what it runs; and a step up or down this part of what it takes
TAKES_NONE = frozenset({"starting", "sleeping", "draining"})
NOT_OURS = frozenset({"malformed", "status_404"})  # how what is no engine of ours answers when it is asked for its load


def is_full(report: EngineLoad) -> bool:
    """Whether an engine has a longer queue than it needs, from any gateway, or takes no calls."""
    return report.status in TAKES_NONE or (report.max_running > 0 and report.queue_depth > _queue_wanted(report))


def slots_from(report: EngineLoad, held: int, limit: int | None) -> int | None:
    """Return how many calls of this process an engine takes, which holds ``held`` and took ``limit`` until now.

    ``None``: it does not say. Other gateways' calls count against its capacity. Steps down are small, since no call
    gets a slot until so many calls have ended.
    """
    if report.status in TAKES_NONE:
        return 0
    if not report.max_running:
        return None
    wanted = _queue_wanted(report)
    crowd = report.running + report.queue_depth
    most = max(1, report.max_running + wanted - max(0, crowd - held))
    if report.queue_depth > wanted and held:
        excess = math.ceil((report.queue_depth - wanted) * held / crowd)  # each gateway takes its part of it back
        return min(most, max(1, held - min(excess, max(1, held // PART))))
    return most if not limit else min(most, limit + max(1, limit // PART))


def _queue_wanted(report: EngineLoad) -> int:
    return max(2, report.max_running // PART)


class EngineWatch:
    """Looks at every self-hosted endpoint, and resizes those whose slots no setting says, until cancelled."""

    def __init__(
        self,
        edition: Edition,
        limiter: TargetLimiter,
        breakers: Breakers,
        client: UpstreamClient,
        clock: Clock,
        kv_events: KvEvents,
        told: ToldAbilities,
        renew: Callable[[], None],
    ) -> None:
        """``renew``: makes the next edition, where engines tell ``told`` of other abilities than before."""
        self._limiter = limiter
        self._breakers = breakers
        self._client = client
        self._kv_events, self._told, self._renew = kv_events, told, renew
        self._clock = clock
        self._looked: dict[str, float] = {}  # monotonic seconds, by address
        self._serving: dict[str, str] = {}  # the instance that took calls last, by address
        self._slow: Mapping[str, float] = {}  # replicas whose first tokens came late at the last look, by address
        self.follow(edition)

    def follow(self, edition: Edition) -> None:
        """Look at the endpoints of another configuration from the next look on."""
        self._providers, fleet = edition.providers, edition.settings.fleet
        self._networks = fleet.networks if fleet is not None else ()
        rooms, replicas = self._limiter.engines, replicas_of(edition.settings.providers.values())
        self._watched = [(one, rooms.get(one.endpoint.base_url)) for one in replicas]
        watched = {one.endpoint.base_url for one, _ in self._watched}
        self._looked = {where: at for where, at in self._looked.items() if where in watched}
        self._serving = {where: instance for where, instance in self._serving.items() if where in watched}
        self._told.keep(watched)
        self._kv_events.keep(
            {one.endpoint.base_url for one, room in self._watched if room and len(one.provider.endpoints) > 1}
        )

    async def run(self) -> None:
        """Look every second where there are calls, a breaker is open, or nothing was heard yet."""
        while True:
            await self.look_once()
            await asyncio.sleep(EVERY)

    async def look_once(self) -> None:
        """Look at every engine that is due."""
        now = self._clock.monotonic()
        due = [each for each in self._watched if self._is_due(*each, now)]
        self._looked.update((replica.endpoint.base_url, now) for replica, _ in due)
        if any(await asyncio.gather(*(self._look_at(replica, room) for replica, room in due))):
            self._renew()
        slow, before = self._limiter.slow_replicas(), self._slow
        for where in slow.keys() - before.keys():
            log.warning("replica_slow", endpoint=where, times_as_late=round(slow[where], 1))
        for where in before.keys() - slow.keys():
            log.info("replica_slow_no_more", endpoint=where)
        self._slow = slow

    def _is_due(self, replica: Replica, room: SlotPool | None, now: float) -> bool:
        where = replica.endpoint.base_url
        is_called = room is not None and (bool(room.held) or room.has_waiting or room.is_full)
        is_idle = not is_called and not self._breakers.has_open_at(where) and self._told.has_heard(where)
        return not is_idle or now - self._looked.get(where, -math.inf) >= IDLE_EVERY

    async def _look_at(self, replica: Replica, room: SlotPool | None) -> bool:
        """Take what an engine says, and return whether it can do something else than before."""
        where = replica.endpoint.base_url
        try:
            report = await ask_load(self._client, self._providers, replica)
        except UpstreamFailure as exc:
            self._note_instance(where, "")
            if room is not None:
                room.state = ""
                self._limiter.resize(room, None, is_full=False)  # its breakers decide whether it is called
                self._kv_events.lose(where)
            return exc.outcome in NOT_OURS and self._told.hear_nothing(where)
        if room is not None:
            slots = slots_from(report, len(room.held), room.limit)
            room.state = report.status if report.status in TAKES_NONE else ""
            self._limiter.resize(room, slots, is_full=is_full(report), capacity=report.max_running)
            room.takes_blocks, room.adapters = report.kv_transfer, frozenset(report.adapters)
            if len(replica.provider.endpoints) > 1:
                self._kv_events.note(where, report.instance_id, report.kv_events, self._networks)
        self._note_instance(where, "" if report.status in TAKES_NONE else report.instance_id)
        return self._told.hear(where, report.abilities)

    def _note_instance(self, where: str, instance: str) -> None:
        """Note which instance takes calls, none where it is empty. What failed before it took them, at this process or
        the last, tells nothing of what it does now."""
        if instance and self._serving.get(where, instance) != instance:
            self._breakers.try_again(where)
        self._serving[where] = instance
