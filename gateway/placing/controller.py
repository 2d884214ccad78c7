# `tollgate fleet up`: one controller at a time looks at heartbeats and targets; a placer starts and stops its replicas.
# Replicas outlive a controller that dies; the next one finds them. While Redis is away nothing is started or stopped.

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog
from msgspec.structs import replace
from redis.asyncio import Redis

from billing.quotas.rate_wire import REDIS_AWAY
from gateway.config.file import load_settings
from gateway.core.background import stop_all
from gateway.core.clock import Clock
from gateway.core.settings import EngineSpec, Pool, Rollout, Settings
from gateway.fleet.autoscaling import read_states
from gateway.fleet.discovery import EVERY as HEAR_EVERY
from gateway.fleet.discovery import admissions, announced_in
from gateway.fleet.membership import LATE, Member, Membership
from gateway.fleet.rollouts import (
    REPLACING,
    ROLLED_BACK,
    STANDING,
    Compared,
    Rolling,
    announced_revision,
    read_compared,
    read_name,
    read_rollouts,
    rollout_key,
)
from gateway.placing.engine_orders import EngineOrders
from gateway.placing.placer import CannotPlace, Order, Placer, load_of, may_be_loaded, new_name, order_for, revision_of
from gateway.placing.plan import (
    GRACE,
    Action,
    Kill,
    Observation,
    PoolState,
    Proved,
    RolledBack,
    SeenReplica,
    Sleep,
    Start,
    Stop,
    Trial,
    WakeUp,
    after_death,
    decide,
    due_at,
)
from gateway.placing.records import Lease, keep_proved, read_proved
from gateway.run.reload import Read, read_again
from gateway.telemetry.logging import configure_logging
from protocol.serving.announcements import ACTIVE, DRAINING, SLEEPING
from protocol.serving.redis_client import open_redis

EVERY = 0.25  # seconds between looks
LISTENS = LATE + 2 * HEAR_EVERY  # seconds, after which heartbeats of replicas that are gone are known for what they are
PATIENCE = 1.0  # seconds for Redis to answer
DIES_WITHIN = 30.0  # seconds after SIGKILL: many gigabytes are given back first
DRIFT = 1.0  # seconds between two tellings of one moment
TELL_AGAIN = 10.0  # seconds after which gateways are told of a rollout again: Redis may have lost it

NOTHING_COMPARED: Mapping[str, Compared] = {}

log = structlog.get_logger()


class Controller:
    """Brings the pools of a configuration to their targets. ``open_placer`` is called when its turn comes."""

    def __init__(self, settings: Settings, open_placer: Callable[[], Placer], redis: Redis, clock: Clock) -> None:
        self._open_placer, self._redis, self._clock = open_placer, redis, clock
        self._lease = Lease(redis, f"{socket.gethostname()}:{os.getpid()}:{clock.new_id()[-8:]}")
        self._placer: Placer | None = None  # None: it is another's turn
        self._owner: str | None = None
        self._states: dict[str, PoolState] = {}
        self._targets: dict[str, int] = {}  # as they were known last
        self._rollouts: dict[str, Rollout] = {}  # of pools that the file has, or had: their replicas drain by these
        self._engines: dict[str, EngineSpec] = {}  # by revision
        self._members: dict[str, Membership] = {}
        self._is_away = False
        self._told: dict[str, Rolling | None] = {}  # what gateways were told of each pool's rollout,
        self._told_at: dict[str, float] = {}  # and when (monotonic seconds)
        self._hears_since: float | None = None  # monotonic seconds; None: not all pools yet
        self._heard_at = 0.0  # the last time
        self._orders = EngineOrders()
        # Names of replicas by those that their processes were started with: as they were heard last, and as they count.
        self._serving: dict[str, str] = {}
        self._named: dict[str, str] = {}
        self._loading: dict[str, tuple[str, asyncio.Task[bool]]] = {}  # by process: the replica that it is to become
        self._unfit: set[tuple[str, str]] = set()  # processes, and the revisions that they could not load
        self._settings = settings
        self.follow(settings)

    @property
    def acts(self) -> bool:
        """Whether it is this controller's turn."""
        return self._placer is not None

    def follow(self, settings: Settings) -> None:
        """Go by another configuration from the next look on; what was rolled back is tried again."""
        before, self._settings = self._settings, settings
        pools = settings.fleet.pools.items() if settings.fleet else ()
        self._pools = {name: pool for name, pool in pools if pool.engine}
        self._secrets = settings.fleet.secrets if settings.fleet else ()
        known, self._members = self._members, {}
        for admission in admissions(settings):
            member = self._members[admission.pool] = known.get(admission.pool) or Membership(admission)
            member.follow(admission)
        for name, pool in self._pools.items():
            assert pool.engine is not None
            if name in before.providers and _secret_of(before, name) != _secret_of(settings, name):
                log.warning("replicas_have_secret_of_before", pool=name, how="docs/operations/secrets.md")
            self._rollouts[name] = pool.rollout
            self._engines[revision_of(pool.engine)] = pool.engine
        self._states = {name: _tried_again(state) for name, state in self._states.items()}
        self._unfit.clear()
        if self._members.keys() - known.keys():
            self._hears_since = None

    async def hear(self) -> None:
        """Hear all replicas, until cancelled."""
        while True:
            with suppress(*REDIS_AWAY):
                pools = dict(self._members)
                found = await announced_in(self._redis, pools)
                for pool, announced in zip(pools.values(), found, strict=True):
                    pool.hear(announced, self._clock.monotonic(), self._clock.now())
                self._heard_at = self._clock.monotonic()
                if self._hears_since is None and pools.keys() == self._members.keys():
                    self._hears_since = self._heard_at
            await asyncio.sleep(HEAR_EVERY)

    async def look_once(self) -> None:
        """Do what is to be done now, if it is this controller's turn and Redis answers."""
        try:
            since = self._hears_since
            if not await self._takes_turn() or since is None or self._heard_at - since < LISTENS:
                return
            states = await read_states(self._redis, self._pools)
            targets = {name: state.target for name, state in states.items()}
            on_trial = [name for name, told in self._told.items() if told is not None and told.reason is None]
            await self._act_in_all(targets, await read_compared(self._redis, on_trial))
        except (*REDIS_AWAY, CannotPlace) as exc:
            if not self._is_away:
                log.warning("fleet_kept", error=str(exc) or repr(exc), kept="the replicas that are there")
            self._is_away = True
        else:
            self._is_away = False

    async def end(self, is_hurried: Callable[[], bool]) -> None:
        """Let all replicas drain, and wait until they have ended, or cannot be ended; then another controller may
        begin."""
        if (placer := self._placer) is not None:
            began, asked = self._clock.monotonic(), set[str]()
            drain = max((each.drain for each in self._rollouts.values()), default=Rollout().drain)
            killed_at: float | None = None
            while names := await self._names(placer):
                now = self._clock.monotonic()
                is_late = is_hurried() or now - began > drain + GRACE
                killed_at = now if is_late and killed_at is None else killed_at
                if killed_at is not None and now - killed_at > DIES_WITHIN:  # a driver may hold a process for ever
                    log.error("replicas_left", replicas=sorted(names), error="SIGKILL did not end them")
                    break
                for name in [each for each in names if is_late or each not in asked]:
                    await asyncio.to_thread(placer.kill if is_late else placer.stop, name)
                asked.update(names)
                with suppress(*REDIS_AWAY):
                    if (owner := await self._lease.take()) != self._lease.owner:
                        log.warning("replicas_left", acts=owner)  # where it starts replicas these are never at an end
                        break
                await asyncio.sleep(EVERY)
        await self.leave()

    async def _names(self, placer: Placer) -> Collection[str]:
        """Return what is still there at the end; nothing, where that cannot be said."""
        try:
            return set(await asyncio.to_thread(placer.names))
        except CannotPlace as exc:
            log.error("replicas_left", error=str(exc))
            return ()

    async def leave(self) -> None:
        """Let another controller begin with the replicas as they are."""
        if self._placer is not None:
            self._placer = None
            with suppress(*REDIS_AWAY):
                await self._lease.release()

    async def close(self) -> None:
        """Ask nothing of replicas any more."""
        await self._orders.close()

    async def _takes_turn(self) -> bool:
        owner = await self._lease.take()
        if owner == self._lease.owner:
            if self._placer is None:
                proved = await read_proved(self._redis, tuple(self._pools), self._secrets)
                self._engines |= {revision_of(engine): engine for engine in proved.values()}
                self._targets, self._told = {}, {}
                goes_on = await read_rollouts(self._redis, tuple(self._pools))
                now = self._clock.monotonic()
                self._states = {
                    name: PoolState(good=revision_of(engine), trial=_taken_over(goes_on.get(name), now))
                    for name, engine in proved.items()
                }
                self._placer = self._open_placer()  # in the main thread: it may have to set signals back
                adopted = sorted(await asyncio.to_thread(self._placer.names))
                log.info("fleet_controller_acts", owner=owner, pools=sorted(self._pools), adopted=adopted)
        else:
            if owner != self._owner:
                log.info("fleet_controller_waits", acts=owner)
            self._placer = None
        self._owner = owner
        return self._placer is not None

    async def _act_in_all(
        self, targets: Mapping[str, int], compared: Mapping[str, Compared] = NOTHING_COMPARED
    ) -> None:
        assert self._placer is not None
        self._name_replicas(await asyncio.to_thread(self._placer.names))
        meant = filter(None, map(read_name, self._named.values()))
        for name in dict.fromkeys((*self._pools, *(pool for pool, _ in meant))):
            replicas = {one: found[1] for one in self._named.values() if (found := read_name(one)) and found[0] == name}
            pool = self._pools.get(name, Pool())
            seen = self._observation(name, pool, replicas, targets.get(name))
            if (told := self._told.get(name)) is not None and (known := compared.get(name)) is not None:
                seen = replace(seen, compared=known if known.since == told.since else None)
            before = self._states.get(name, PoolState())
            actions, self._states[name] = decide(seen, before, self._rollouts.get(name, pool.rollout))
            try:
                for action in actions:
                    if not await self._takes_turn():  # a look may take longer than the lease lasts
                        return
                    await self._act(name, pool, action)
                await self._tell(name, self._states[name], self._rollouts.get(name, pool.rollout))
            except REDIS_AWAY:
                self._states[name] = before  # it is decided again; an engine may be told twice to end
                raise

    def _name_replicas(self, processes: Collection[str]) -> None:
        """Name each process by what it serves: one that took another pool's model says so itself, and one that loads it
        counts there already."""
        self._serving = {process: self._serving.get(process, process) for process in processes}
        of_number = {process.rpartition(".")[2]: process for process in processes}
        heard = [one for pool in self._members.values() for one in pool.members()]
        for one in sorted(heard, key=lambda one: one.heard_at):
            name = one.said.instance_id.rpartition("-")[0]
            if (process := of_number.get(name.rpartition(".")[2])) is not None and announced_revision(one) is not None:
                self._serving[process] = name
        for process, (name, told) in list(self._loading.items()):
            has_failed = process not in processes or (told.done() and not told.result())
            if has_failed or self._serving[process] == name:
                del self._loading[process]
                self._unfit |= {(process, name.rsplit(".", 2)[1])} if has_failed else set()
                if has_failed and process in processes:
                    self._forget(name)  # another sleeper, or a process, is the next try, and no rollout fails by it
        self._named = self._serving | {process: name for process, (name, _) in self._loading.items()}

    def _observation(self, name: str, pool: Pool, replicas: Mapping[str, str], target: int | None) -> Observation:
        """Return a pool as it is; one that the file does not have any more is to have no replica."""
        heard, members = self._heard(name), self._members.get(name)
        seen = []
        for each, revision in replicas.items():
            if (one := heard.get(each)) is None or members is None:
                seen.append(SeenReplica(name=each, revision=revision))
                continue
            said, state = one.said, members.state_of(one)
            counts = {"answered": said.answered, "failed": said.failed}
            seen.append(SeenReplica(name=each, revision=revision, state=state, refused=one.refused, **counts))
        elsewhere = [one for each, one in heard.items() if each not in replicas and one.is_able]
        others = sum(members is not None and members.state_of(one) == ACTIVE for one in elsewhere)
        provider = self._settings.providers.get(name)
        others += len(provider.endpoints) if provider is not None else 0
        rules, engine = pool.scaling, pool.engine
        if rules is None or engine is None:
            target = 0
        else:  # until a gateway has decided, what one decided before, or as many as were there first and did not drain
            there = sum(one.state not in (DRAINING, SLEEPING) for one in seen)
            known = self._targets.get(name, there) if target is None else target
            self._targets[name] = known
            target = min(max(known, rules.min), rules.max)
        wanted = revision_of(engine) if engine is not None else ""
        return Observation(
            now=self._clock.monotonic(),
            target=target,
            wanted=wanted,
            replicas=seen,
            others=others,
            asleep=rules.asleep if rules is not None else 0,
        )

    def _heard(self, pool: str) -> dict[str, Member]:
        """Return the replicas that announce themselves, by the names that they were started with."""
        members = self._members.get(pool)
        known = members.members() if members is not None else []
        return {one.said.instance_id.rpartition("-")[0]: one for one in sorted(known, key=lambda one: one.heard_at)}

    async def _act(self, name: str, pool: Pool, action: Action) -> None:
        assert self._placer is not None
        match action:
            case Start(revision):
                await self._start(name, pool, revision)
            case Stop(replica, why):
                log.info("replica_stopping", pool=name, replica=replica, reason=why)
                await asyncio.to_thread(self._placer.stop, self._process_of(replica))
            case Sleep(replica, why):
                log.info("replica_sent_to_sleep", pool=name, replica=replica, reason=why)
                self._ask(name, replica, "/sleep")
            case WakeUp(replica):
                log.info("replica_woken", pool=name, replica=replica)
                self._ask(name, replica, "/wake_up")
            case Kill(replica, why):
                log.warning("replica_killed", pool=name, replica=replica, reason=why)
                await asyncio.to_thread(self._placer.kill, self._process_of(replica))
            case RolledBack(revision, why):
                log.error("rollout_rolled_back", pool=name, revision=revision, reason=why, kept=self._states[name].good)
            case Proved(revision):
                await keep_proved(self._redis, name, self._engines[revision], self._secrets[0])
                log.info("rollout_finished", pool=name, revision=revision)

    async def _tell(self, name: str, state: PoolState, rules: Rollout) -> None:
        """Tell gateways what a pool's rollout is at, where that is news."""
        trial, told = state.trial, self._told.get(name)
        if trial is None or trial.revision == state.good or state.good is None:
            if told is not None or name not in self._told:
                await self._redis.delete(rollout_key(name))
            self._told[name] = None
            return
        reason = state.given_up.get(trial.revision)
        unix = self._clock.now() - self._clock.monotonic()
        is_due = reason is None and any(trial.replicas)
        goes_on = told is not None and told.revision == trial.revision and (told.reason is None or reason is not None)
        said = Rolling(
            state=ROLLED_BACK if reason is not None else REPLACING if trial.has_stood else STANDING,
            revision=trial.revision,
            kept=state.good,
            share=round(trial.share, 4),
            since=told.since if told is not None and goes_on else unix + trial.since,
            due_at=unix + due_at(trial, rules) if is_due else None,
            reason=reason,
        )
        now = self._clock.monotonic()
        if told is None or not _is_same(said, told) or now - self._told_at[name] > TELL_AGAIN:
            await self._redis.set(rollout_key(name), msgspec.json.encode(said))
            self._told[name], self._told_at[name] = said, now

    def _ask(self, pool: str, replica: str, path: str) -> None:
        """Ask something of a replica that announces itself; another look finds out what became of it."""
        if (one := self._heard(pool).get(replica)) is not None and one.refused is None:
            self._orders.send(self._settings.providers[pool], one.said.base_url, path)

    async def _start(self, name: str, pool: Pool, revision: str) -> None:
        assert self._placer is not None
        replica = new_name(name, revision)
        order = order_for(replica, self._engines[revision], pool.rollout, self._environment(name))
        if may_be_loaded(order) and self._is_loaded(name, pool, revision, order):
            return
        try:
            await asyncio.to_thread(self._placer.start, order)
        except CannotPlace as exc:
            self._states[name] = after_death(self._states[name], self._clock.monotonic())
            log.error("replica_not_started", pool=name, replica=replica, reason=str(exc))
        else:
            log.info("replica_started", pool=name, replica=replica, model=self._engines[revision].model)

    def _is_loaded(self, name: str, pool: Pool, revision: str, order: Order) -> bool:
        """Have a replica of another pool that sleeps take the model, where there is one that may and can."""
        told, needed = load_of(order)
        for other, one, process in self._sleepers(name, pool, revision):
            its, known, each = self._pools[other], self._states[other].known, self._named[process]
            own = order_for(each, self._engines[known[each].revision], its.rollout, self._environment(other))
            if load_of(own)[1] == needed:
                replica = f"{name}.{revision}.{process.rpartition('.')[2]}"
                body = msgspec.json.encode(told | {"instance_id": replica})
                where, patience = (self._settings.providers[other], one.said.base_url), pool.rollout.healthy_within
                self._loading[process] = replica, self._orders.send(*where, "/load_model", body, patience)
                self._named[process] = replica
                self._forget(each)
                log.info("replica_takes_model", pool=name, replica=replica, was=each, model=told["model"])
                return True
        return False

    def _forget(self, replica: str) -> None:
        """Let a pool lose a replica that has not died."""
        pool = replica.rsplit(".", 2)[0]
        state = self._states.get(pool, PoolState())
        known = {name: seen for name, seen in state.known.items() if name != replica}
        self._states[pool] = replace(state, known=known)

    def _sleepers(self, name: str, pool: Pool, revision: str) -> Iterator[tuple[str, Member, str]]:
        """Find replicas of other pools of the region that sleep, and may load a revision: pool and process of each."""
        for other, its in self._pools.items():
            known, members = self._states.get(other, PoolState()).known, self._members[other]
            for each, one in self._heard(other).items() if other != name and its.region == pool.region else ():
                process, mine = self._process_of(each), known.get(each)
                is_free = mine is not None and mine.asleep_since is not None and mine.stopping_since is None
                is_known = (
                    mine is not None and mine.revision in self._engines and (process, revision) not in self._unfit
                )
                if is_free and is_known and members.state_of(one) == SLEEPING and one.refused is None:
                    yield other, one, process

    def _process_of(self, replica: str) -> str:
        """Return the name that a replica's process was started with."""
        return next((process for process, name in self._named.items() if name == replica), replica)

    def _environment(self, pool: str) -> dict[str, str]:
        """Return the secrets of a replica."""
        keys = _secret_of(self._settings, pool)
        told = {"TOLLGATE_FLEET_SECRET": self._secrets[0], "TOLLGATE_FLEET_REDIS": self._settings.redis_url}
        return told | ({"TOLLGATE_ENGINE_SECRET": keys[0]} if keys else {})


def _secret_of(settings: Settings, pool: str) -> tuple[str, ...]:
    """Return the key that replicas are started with, if there is one."""
    return settings.providers[pool].api_keys[:1]


def _tried_again(state: PoolState) -> PoolState:
    """Return what is remembered of a pool once its configuration was read again."""
    return replace(state, given_up={}, tries=0, trial=None if state.given_up else state.trial)


def _taken_over(told: Rolling | None, now: float) -> Trial | None:
    """Return the rollout that another controller left, from this moment (monotonic) on."""
    if told is None or told.reason is not None:
        return None
    has_stood = told.state == REPLACING
    return Trial(revision=told.revision, since=now, moved_at=now, share=told.share, has_stood=has_stood)


def _is_same(said: Rolling, told: Rolling) -> bool:
    """Whether nothing is news but how two clocks drift apart."""
    is_near = abs((said.due_at or 0.0) - (told.due_at or 0.0)) < DRIFT
    return is_near and replace(said, due_at=told.due_at) == told


def run_controller(path: Path, settings: Settings, open_placer: Callable[[], Placer]) -> int:
    """Control until SIGTERM or SIGINT, and let replicas end; asked twice, end them at once. SIGHUP has the file at
    ``path`` read again, SIGUSR1 ends the controller alone. Return the exit status."""
    configure_logging()
    return asyncio.run(_control(lambda: load_settings(path), settings, open_placer, Clock()))


async def _control(read: Read, settings: Settings, open_placer: Callable[[], Placer], clock: Clock) -> int:
    asked: list[signal.Signals] = []
    hung_up, told = asyncio.Event(), asyncio.Event()

    def stop(number: signal.Signals) -> None:
        asked.append(number)
        told.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        loop.add_signal_handler(number, stop, number)
    loop.add_signal_handler(signal.SIGHUP, hung_up.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # held since before the file was read
    redis = open_redis(settings.redis_url, timeout=PATIENCE)
    controller = Controller(settings, open_placer, redis, clock)
    hearing = asyncio.create_task(controller.hear())
    try:
        while not told.is_set() and not hearing.done():
            if hung_up.is_set():
                hung_up.clear()
                if (found := await read_again(read, settings)) is not None:
                    settings = found
                    controller.follow(settings)
                    log.info("config_reloaded")
            await controller.look_once()
            with suppress(TimeoutError):
                await asyncio.wait_for(told.wait(), EVERY)
        if asked and signal.SIGUSR1 not in asked:
            await controller.end(lambda: len(asked) > 1)
        else:
            await controller.leave()
    finally:
        await stop_all([hearing])
        await controller.close()
        await redis.aclose()
    if asked:
        return 0
    log.error("fleet_controller_failed", exc_info=hearing.exception(), kept="the replicas that are there")
    return 1
