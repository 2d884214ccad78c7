# How many replicas each pool should have, decided once for all gateways: the one whose turn it is reads what engines
# reported and what the ledger counted, and the decision with its state stands in Redis, compared and set, so that two
# that decide at once decide once. Gateways start and stop nothing: an orchestrator reads the target.

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import suppress

import msgspec
import structlog
from msgspec import Struct
from redis.asyncio import Redis
from redis.exceptions import WatchError

from billing.core.store_errors import POSTGRES_AWAY
from billing.ledger.instance_samples import Instance, last_looks
from billing.ledger.pool_demand import PoolHours, read_hours, read_refused
from billing.quotas.rate_wire import REDIS_AWAY
from gateway.core.clock import Clock
from gateway.core.settings import Scaling, Settings
from gateway.fleet.autoscaler import (
    EVERY,
    USUAL_PROMPT,
    USUAL_REPLY,
    Observation,
    ReplicaLoad,
    ScaleState,
    decide,
    set_by_hand,
)
from gateway.fleet.discovery import Discovery
from gateway.fleet.instances import STALE_AFTER
from gateway.fleet.rollouts import compare_versions
from gateway.fleet.season import expected_rate
from gateway.inference.edition import Edition
from gateway.storage.database import Database
from protocol.serving.announcements import ACTIVE
from protocol.serving.engine_load import EngineLoad
from protocol.serving.redis_client import read_each

TURN = "tollgate:fleet-turn"  # Redis key: the gateway that sets it decides
KEPT = 7 * 86_400  # seconds: a decision in Redis
HISTORY = 29 * 86_400.0  # seconds: the season is read from
HISTORY_LASTS = 300.0  # seconds until it is read again
REFUSED_WITHIN = 120.0  # seconds
ENOUGH_CALLS = 20.0  # of two hours, whose mean lengths count alone

log = structlog.get_logger()


class PoolTarget(Struct, frozen=True, kw_only=True):
    """What was decided last of a pool with ``scaling``; ``state`` None: nothing yet."""

    pool: str
    rules: Scaling
    ready: int  # replicas that take calls, as this process knows them
    state: ScaleState | None
    rolled_back: str | None  # the revision that a controller gave up, and why; None: it runs what the file says


class Autoscaler:
    """Decides when it is this process's turn, and knows what was decided, until cancelled."""

    def __init__(self, edition: Edition, discovery: Discovery, database: Database, redis: Redis, clock: Clock) -> None:
        self._discovery, self._database, self._redis, self._clock = discovery, database, redis, clock
        self._known: dict[str, ScaleState] = {}
        self._ready: dict[str, int] = {}
        self._hours: tuple[float, Mapping[str, PoolHours]] | None = None  # monotonic seconds at which they were read
        self._is_away = False
        self.follow(edition)

    def follow(self, edition: Edition) -> None:
        """Go by another configuration from the next decision on."""
        self._settings: Settings = edition.settings
        fleet = self._settings.fleet
        self._rules = {name: pool.scaling for name, pool in fleet.pools.items() if pool.scaling} if fleet else {}
        self._hours = None

    def targets(self) -> dict[str, int]:
        """Return how many replicas each pool should have, as far as that is decided."""
        return {pool: state.target for pool, state in self._known.items() if pool in self._rules}

    async def run(self) -> None:
        """Decide or read what was decided, where any pool has ``scaling``."""
        while True:
            if self._rules:
                await self.look_once()
            await asyncio.sleep(EVERY)

    async def look_once(self) -> None:
        """Decide, if it is this process's turn, and know what was decided. Without Redis or Postgres none changes."""
        try:
            if await self._redis.set(TURN, "taken", nx=True, px=round(EVERY * 950)):
                await self.decide_once()
            await self.read()
        except (*REDIS_AWAY, *POSTGRES_AWAY) as exc:
            if not self._is_away:
                log.warning("fleet_targets_kept", error=repr(exc))
            self._is_away = True
        else:
            self._is_away = False

    async def read(self) -> list[PoolTarget]:
        """Return what was decided last of each pool; what this process knew where Redis does not answer."""
        pools = sorted(self._rules)
        with suppress(*REDIS_AWAY):
            self._known |= await read_states(self._redis, pools)
        rollouts = self._discovery.rollouts()
        rolled_back = {pool: f"{one.revision}: {one.reason}" for pool, one in rollouts.items() if one.reason}
        ready = self._ready_by_announcement()
        return [
            PoolTarget(
                pool=pool,
                rules=self._rules[pool],
                ready=max(ready.get(pool, 0), self._ready.get(pool, 0)),
                state=self._known.get(pool),
                rolled_back=rolled_back.get(pool),
            )
            for pool in pools
        ]

    async def decide_once(self) -> None:
        """Decide of each pool. Raises what ``REDIS_AWAY`` and ``POSTGRES_AWAY`` have."""
        now = self._clock.now()
        async with self._database.begin() as connection:
            looks = await last_looks(connection, now - STALE_AFTER)
            if self._hours is None or self._clock.monotonic() - self._hours[0] >= HISTORY_LASTS:
                self._hours = self._clock.monotonic(), await read_hours(connection, self._rules, now - HISTORY)
            refused = await read_refused(connection, now - REFUSED_WITHIN)
            regions = {pool: self._settings.fleet.pools[pool].region for pool in self._rules if self._settings.fleet}
            members = [one.member for one in self._discovery.replicas()]
            await compare_versions(self._redis, connection, regions, members, now)
        for pool, rules in self._rules.items():
            seen = self._observation(pool, rules, looks, refused, now)
            self._ready[pool] = len(seen.replicas)
            await self._decide(pool, rules, seen)

    async def set_target(self, pool: str, target: int | None) -> None:
        """Set a pool's target by hand; ``None``: it follows the demand again. Raises what ``REDIS_AWAY`` has."""
        while True:
            async with self._redis.pipeline() as pipe:
                await pipe.watch(_key(pool))
                state = set_by_hand(_read_state(await pipe.get(_key(pool))), target, self._clock.now())
                pipe.multi()
                pipe.set(_key(pool), msgspec.json.encode(state), ex=KEPT)
                with suppress(WatchError):  # a gateway has decided meanwhile
                    await pipe.execute()
                    return

    async def _decide(self, pool: str, rules: Scaling, seen: Observation) -> None:
        async with self._redis.pipeline() as pipe:
            await pipe.watch(_key(pool))
            known = _read_state(await pipe.get(_key(pool)))
            state = await asyncio.to_thread(decide, seen, known, rules)  # it may play a queue for a second
            pipe.multi()
            pipe.set(_key(pool), msgspec.json.encode(state), ex=KEPT)
            try:
                await pipe.execute()
            except WatchError:  # another gateway has decided meanwhile
                return
        if known is None or state.target != known.target:
            before = None if known is None else known.target
            log.info("fleet_target_changed", pool=pool, before=before, target=state.target, reason=state.reason)

    def _observation(
        self, pool: str, rules: Scaling, looks: list[Instance], refused: Mapping[str, int], now: float
    ) -> Observation:
        assert self._hours is not None
        hours = self._hours[1].get(pool, PoolHours())
        prompt, reply = hours.lengths(now, ENOUGH_CALLS) or (USUAL_PROMPT, USUAL_REPLY)
        return Observation(
            now=now,
            replicas=self._loads(pool, looks),
            prompt=prompt,
            reply=reply,
            expected=expected_rate(hours.calls, now, now + rules.cold_start + EVERY),
            refused=sum(refused.get(name, 0) for name in self._names_of(pool)),
        )

    def _loads(self, pool: str, looks: list[Instance]) -> list[ReplicaLoad]:
        """Return the loads of a pool's replicas that take calls: by their heartbeats, those of the file by a look."""
        announced = {one.member.said.instance_id: one for one in self._discovery.replicas()}
        loads = {}
        for look in looks:
            said = announced.get(look.instance_id)
            takes_calls = look.load["status"] == ACTIVE if said is None else said.takes_calls
            if look.provider == pool and takes_calls:
                load = msgspec.convert(look.load, EngineLoad)
                loads[look.instance_id] = ReplicaLoad(
                    running=load.running,
                    waiting=load.queue_depth,
                    max_running=load.max_running,
                    kv=load.kv_utilization,
                    finished=load.requests_per_second,
                    cost=load.step_cost,
                )
        for name, one in announced.items():
            if one.member.said.pool == pool and one.takes_calls:
                loads.setdefault(name, ReplicaLoad())
        return list(loads.values())

    def _ready_by_announcement(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for one in self._discovery.replicas():
            found[one.member.said.pool] = found.get(one.member.said.pool, 0) + one.takes_calls
        return found

    def _names_of(self, pool: str) -> set[str]:
        """Return the names by which calls ask for what the pool serves."""
        models = self._settings.models.items()
        served = {name for name, model in models if any(one.provider == pool for one in model.everywhere)}
        return served | {alias for alias, meant in self._settings.aliases.items() if meant in served}


async def read_states(redis: Redis, pools: Collection[str]) -> dict[str, ScaleState]:
    """Return what was decided last, of the pools of which it was. Raises what ``REDIS_AWAY`` has."""
    found = await read_each(redis, map(_key, pools))
    states = {pool: _read_state(value) for pool, value in zip(pools, found, strict=True)}
    return {pool: state for pool, state in states.items() if state is not None}


def _key(pool: str) -> str:
    return f"tollgate:fleet-target:{{{pool}}}"


def _read_state(value: bytes | str | None) -> ScaleState | None:
    try:
        return None if value is None else msgspec.json.decode(value, type=ScaleState)
    except msgspec.MsgspecError:  # another version's
        return None
