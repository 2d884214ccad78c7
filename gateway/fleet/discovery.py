# Replicas that come and go: what engines announce in Redis becomes the endpoints of their pools, by the way that a
# changed tollgate.yaml takes: the next edition. Calls that run keep theirs to their end. While Redis is away, the
# replicas stay as they were: a gateway that starts meanwhile goes by what it, or another on its data directory, heard
# last.

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace
from redis.asyncio import Redis

from billing.quotas.rate_wire import REDIS_AWAY
from gateway.core.clock import Clock
from gateway.core.private_files import write_privately
from gateway.core.settings import Fleet, Settings
from gateway.fleet.membership import LOST, Admission, Member, Membership
from gateway.fleet.rollouts import Rolling, announced_revision, rollout_key, rollouts_in
from gateway.inference.edition import Editions
from protocol.serving.announcements import ACTIVE, LONGEST, SLEEPING, pool_key
from router.catalog.targets import Endpoint
from router.replicas import VersionShare

REFUSED = "refused"  # whatever state it announces
KEEP_EVERY = 60.0  # seconds between writings of what is heard, where nothing changes
EVERY = 0.15  # seconds between looks: with LATE, a lost heartbeat is known within 0.9 s

log = structlog.get_logger()


class Replica(Struct, frozen=True, kw_only=True):
    """An announced replica as it is shown."""

    member: Member
    state: str
    takes_calls: bool
    revision: str | None = None  # None: no controller started it
    share: float | None = None  # of its pool's conversations, that its version answers; None: there is one version


class Discovery:
    """Finds the replicas of all pools of a configuration, until cancelled."""

    def __init__(self, redis: Redis, clock: Clock, path: Path, shares: dict[str, VersionShare] | None = None) -> None:
        """``shares``: is told which replicas of each pool are of a new version, and which share they have."""
        self._redis = redis
        self._clock = clock
        self._shares = {} if shares is None else shares
        self._rollouts: dict[str, Rolling] = {}
        self._path = path  # where the announcements that were heard last are kept, as they stood in Redis
        self._keep_at: float | None = None  # monotonic seconds; None: nothing was heard yet
        self._editions: Editions | None = None
        self._pools: dict[str, Membership] = {}
        self._asked: dict[str, tuple[str, ...]] = {}  # addresses by pool, as the newest edition has them
        self._told: dict[
            str, dict[str, tuple[str, str | None]]
        ] = {}  # states and refusals as the log has them, by pool
        self._unsigned: dict[str, int] = {}  # announcements that are not signed, by pool, at the last look
        self._too_long: dict[str, int] = {}  # those that are too long to be read, as well
        self.is_away = False  # Redis does not answer

    def begin(self, editions: Editions) -> None:
        """Find replicas for these editions."""
        self._editions = editions
        self._follow(editions.current.settings)
        editions.follow(lambda edition: self._follow(edition.settings))

    def join(self, settings: Settings) -> Settings:
        """Return what tollgate.yaml says, with the replicas beside it that are asked now."""
        return joined(settings, self._asked)

    def with_sleepers(self, settings: Settings) -> Settings:
        """Return settings with the replicas beside them that sleep."""
        pools = self._pools.items()
        asleep = {name: [one.said.base_url for one in pool.members() if _sleeps(pool, one)] for name, pool in pools}
        return joined(settings, asleep)

    async def run(self) -> None:
        """Look again and again, where there are pools."""
        while True:
            if self._pools:
                await self.look_once()
            await asyncio.sleep(EVERY)

    async def look_once(self) -> None:
        """Hear all replicas, and make another edition where those that are asked are others."""
        pools = list(self._pools.items())
        try:
            told = await told_in(self._redis, [name for name, _ in pools])
        except REDIS_AWAY as exc:
            if not self.is_away:
                log.warning("fleet_not_heard", error=repr(exc), kept="the replicas that were known")
            self.is_away = True
            for _, pool in pools:
                pool.miss()
            if self._keep_at is None:
                await self._recall()
            return
        if self.is_away:
            log.info("fleet_heard_again")
            self.is_away = False
        found = [announced for announced, _ in told]
        self._rollouts = rollouts_in([name for name, _ in pools], [rollout for _, rollout in told])
        for (name, pool), announced in zip(pools, found, strict=True):
            forgotten = pool.hear(announced, self._clock.monotonic(), self._clock.now())
            self._tell(name, pool)
            if forgotten:
                with suppress(*REDIS_AWAY):
                    await self._redis.hdel(pool_key(name), *forgotten)
        self._share()
        if self._apply() or self._keep_at is None or self._clock.monotonic() >= self._keep_at:
            await self._keep(dict(zip([name for name, _ in pools], found, strict=True)))

    def replicas(self) -> list[Replica]:
        """Return every announced replica, by pool and address."""
        return [
            self._shown(name, pool, member) for name, pool in sorted(self._pools.items()) for member in pool.members()
        ]

    def rollouts(self) -> dict[str, Rolling]:
        """Return the rollouts of pools, as controllers told of them last."""
        return {name: each for name, each in self._rollouts.items() if name in self._pools}

    def count_replicas(self) -> Counter[tuple[str, str]]:
        """Return how many announced replicas are in which state, by pool; those that are refused apart."""
        counted = Counter({(name, ACTIVE): 0 for name in self._pools})
        for one in self.replicas():
            counted[one.member.said.pool, one.state if one.member.refused is None else REFUSED] += 1
        return counted

    def count_rollouts(self) -> dict[str, tuple[str, float]]:
        """Return what the rollout of each pool is at, and the share of conversations that its new version answers."""
        now = self._clock.now()
        return {name: (each.state_at(now), each.share) for name, each in self.rollouts().items()}

    def _shown(self, name: str, pool: Membership, member: Member) -> Replica:
        revision, rollout, share = announced_revision(member), self._rollouts.get(name), None
        if rollout is not None and (rollout.reason is None or rollout.share):
            share = rollout.share if revision == rollout.revision else 1 - rollout.share
        return Replica(
            member=member,
            state=pool.state_of(member),
            takes_calls=member.is_able and member.said.base_url in self._asked.get(name, ()),
            revision=revision,
            share=share,
        )

    def _share(self) -> None:
        """Say which replicas are of a new version."""
        self._shares.clear()
        for name, rollout in self.rollouts().items():
            new = [one for one in self._pools[name].members() if announced_revision(one) == rollout.revision]
            if new:
                self._shares[name] = VersionShare(rollout.share, frozenset(one.said.base_url for one in new))

    def _follow(self, settings: Settings) -> None:
        known, self._pools = self._pools, {}
        for admission in admissions(settings):
            pool = self._pools[admission.pool] = known.get(admission.pool) or Membership(admission)
            pool.follow(admission)
        self._asked = {name: urls for name, urls in self._asked.items() if name in self._pools}

    async def _keep(self, found: Mapping[str, Mapping[bytes, bytes]]) -> None:
        """Write down the announcements of the replicas that are there."""
        self._keep_at = self._clock.monotonic() + KEEP_EVERY
        kept = {
            name: [value for field, value in values.items() if field.decode(errors="replace") in there]
            for name, values in found.items()
            if name in self._pools and (there := self._pools[name].on_time())
        }
        try:
            await asyncio.to_thread(write_privately, self._path, msgspec.json.encode(kept))
        except OSError as exc:
            log.warning("fleet_not_kept", path=str(self._path), error=str(exc))

    async def _recall(self) -> None:
        """Ask the replicas that were heard before this process began."""
        self._keep_at = self._clock.monotonic()
        try:
            content = await asyncio.to_thread(self._path.read_bytes)
            kept = msgspec.json.decode(content, type=dict[str, list[bytes]])
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as exc:
            log.warning("fleet_not_recalled", path=str(self._path), error=str(exc))
            return
        for name, values in kept.items():
            if name in self._pools:
                self._pools[name].recall(values, self._clock.monotonic(), self._clock.now())
        self._apply()

    def _apply(self) -> bool:
        """Make another edition if other replicas are asked than before; return whether they are."""
        assert self._editions is not None
        before, asked = self._asked, {name: pool.base_urls() for name, pool in self._pools.items()}
        moved = [name for name, urls in asked.items() if urls != before.get(name, ())]
        if not moved:
            return False
        self._asked = asked
        try:
            self._editions.renew()
        except BaseException:
            self._asked = before  # as calls have it; the next look tries again
            raise
        for name in moved:
            had, has = {*before.get(name, ())}, {*asked[name]}
            log.info("replicas_changed", pool=name, came=sorted(has - had), went=sorted(had - has))
        return True

    def _tell(self, name: str, pool: Membership) -> None:
        """Log what is new: announcements that are not signed or too long, replicas that come, are refused or lost."""
        if pool.unsigned and not self._unsigned.get(name):
            log.warning("announcements_unsigned", pool=name, count=pool.unsigned, right="one of fleet.secrets")
        self._unsigned[name] = pool.unsigned
        if pool.too_long and not self._too_long.get(name):
            log.warning("announcements_too_long", pool=name, count=pool.too_long, most_bytes=LONGEST)
        self._too_long[name] = pool.too_long
        known, self._told[name] = self._told.get(name, {}), {}
        for member in pool.members():
            said, state = member.said, pool.state_of(member)
            told = self._told[name][said.instance_id] = state, member.refused
            if known.get(said.instance_id) != told:
                write = log.warning if state == LOST or member.refused is not None else log.info
                who: dict[str, Any] = {"instance_id": said.instance_id, "endpoint": said.base_url}
                who |= {"version": said.version, "adapters_left_out": said.adapters_left_out}
                write("replica_announced", pool=name, state=state, refused=member.refused, **who)


def _sleeps(pool: Membership, member: Member) -> bool:
    return member.refused is None and pool.state_of(member) == SLEEPING


async def announced_in(redis: Redis, pools: Iterable[str]) -> list[Any]:
    """Return what is announced in each pool, by instance id. Raises what ``REDIS_AWAY`` has."""
    return [announced for announced, _ in await told_in(redis, pools)]


async def told_in(redis: Redis, pools: Iterable[str]) -> list[tuple[Any, Any]]:
    """Return what is announced in each pool, by instance id, and what its controller says of a rollout. Raises what
    ``REDIS_AWAY`` has."""
    reading = redis.pipeline(transaction=False)
    for name in pools:
        reading.hgetall(pool_key(name))
        reading.get(rollout_key(name))
    found = await reading.execute()
    return list(zip(found[::2], found[1::2], strict=True))


def joined(settings: Settings, asked: Mapping[str, Iterable[str]]) -> Settings:
    """Return settings with addresses that are asked, by pool, beside the endpoints that the file names."""
    providers = dict(settings.providers)
    for pool, base_urls in asked.items():
        fleet, provider = settings.fleet, providers.get(pool)
        if fleet is None or pool not in fleet.pools or provider is None:
            continue
        named = {one.base_url for one in provider.endpoints}
        found = tuple(Endpoint(fleet.pools[pool].region, url) for url in base_urls if url not in named)
        if found:
            providers[pool] = replace(provider, endpoints=(*provider.endpoints, *found))
    return replace(settings, providers=providers)


def admissions(settings: Settings) -> list[Admission]:
    """Return by which announcements each pool of a configuration goes."""
    fleet: Fleet | None = settings.fleet
    if fleet is None:
        return []
    asked: dict[str, set[str]] = {name: set() for name in fleet.pools if name in settings.providers}
    for model in settings.models.values():
        for one in model.everywhere:
            if one.provider in asked:
                asked[one.provider].add(one.upstream_model)
    return [Admission(name, fleet.secrets, fleet.networks, frozenset(served)) for name, served in asked.items()]
