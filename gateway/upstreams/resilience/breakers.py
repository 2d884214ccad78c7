# The breakers of all targets as one process knows them, and what is in cooldown. A call that meets a healthy target
# waits for nothing here: what the gateways tell each other goes through Redis behind it, every half second and at each
# failure. While Redis is away, each process goes by what it sees itself.

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import structlog
from msgspec import Struct
from redis.asyncio import Redis

from billing.quotas.rate_wire import REDIS_AWAY
from gateway.core.background import Background
from gateway.core.clock import Clock
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.resilience.breaker import Breaker, State, Verdict
from gateway.upstreams.resilience.cooldown import Cooldown
from gateway.upstreams.resilience.keys import KeyRing, TargetAway
from gateway.upstreams.resilience.retry import verdict_of
from gateway.upstreams.resilience.shared import DEADLINE, SharedBreakers, Watched
from gateway.upstreams.wire.errors import UpstreamFailure
from gateway.upstreams.wire.limits import read_limits
from protocol.errors import Unshown
from router.catalog.targets import Target, TargetHealth

EVERY = 0.5  # seconds between looks at what the other gateways know
TOGETHER = 0.05  # seconds for which news is gathered
SMALL_PROMPT = 8_000  # characters, about 2,000 tokens: a failure at this size speaks for every team's calls
PROBE_LEASE = 65.0  # seconds after which a probe counts as lost
PROBES_TAKEN = 0.25  # seconds to wait when others have all the probes

OPEN = "its breaker is open"  # why a target is away, as callers are told
PROBED = "its breaker is half open and all probes are out"

NO_TROUBLE: Mapping[str, TargetHealth] = {}
AWAY = TargetHealth(is_open=True)

log = structlog.get_logger()


class Permit(Unshown, Struct, frozen=True):
    """Leave to ask a target once, with this key. Say how it ended: ``succeeded``, ``failed`` or ``abandoned``."""

    watched: Watched
    api_key: str | None
    generation: int
    probe: str | None = None  # its token, when it is one
    asked: Target | None = None  # with keys of its team's own

    def __repr__(self) -> str:
        """Say which target it is for, and no key."""
        return f"Permit({self.watched.target.key!r})"


class Breakers:
    """Who may be asked. ``health`` is for the router, ``enter`` for each attempt."""

    def __init__(
        self,
        registry: ProviderRegistry,
        targets: Iterable[Target],
        clock: Clock,
        background: Background,
        redis: Redis,
        *,
        deadline: float = DEADLINE,
    ) -> None:
        self.transitions: Counter[tuple[str, str, str, str]] = Counter()  # made here: labels and the new state
        self.is_alone = False  # Redis does not answer
        self._clock = clock
        self._background = background
        self._shared = SharedBreakers(redis, deadline=deadline)
        self._keys = KeyRing(registry)
        self._watched: dict[str, Watched] = {}
        self._open: set[str] = set()  # keys of targets whose breaker is not closed
        self._wake = asyncio.Event()
        self._syncing = asyncio.Lock()
        for target in targets:
            self.watch(target)

    def watch(self, target: Target) -> Watched:
        """Return what is known of a target, which is watched from now on."""
        key = target.key
        if (known := self._watched.get(key)) is None:
            policy = self._keys.registry.settings_at(target).breaker
            common = target if target.own is None else Target(target.model, target.endpoint)
            known = self._watched[key] = Watched(common, Breaker(policy))
        return known

    def follow(self, registry: ProviderRegistry, targets: Iterable[Target]) -> None:
        """Go by another configuration: watch its targets under its policies, and no others.

        Calls that began before may still end, or ask again, at a target that is not among them.
        """
        self._keys.registry = registry
        wanted = {target.key: target for target in targets}
        for key in self._watched.keys() - wanted.keys():
            del self._watched[key]
            self._open.discard(key)
        for target in wanted.values():
            watched = self.watch(target)
            watched.target = target
            watched.breaker.follow(registry.settings_at(target).breaker)
        self._wake.set()  # what the other gateways know of the new ones

    def all(self) -> list[Watched]:
        """Return every target that is watched."""
        return list(self._watched.values())

    def health(self, asked_as: Callable[[Target], Iterable[Target]] | None = None) -> Mapping[str, TargetHealth]:
        """Return the targets that are better not asked now, by ``Target.key``.

        ``asked_as``: a target as some team's calls are asked there, where that is not with the deployment's keys.
        """
        cooldowns = self._keys.cooldowns
        are_resting = cooldowns.has_common if asked_as is None else bool(cooldowns)
        if not self._open and not are_resting:
            return NO_TROUBLE
        now = self._clock.monotonic()
        suspects = self._watched if are_resting else self._open
        return {key: AWAY for key in suspects if self._goes_last(self._watched[key], now, asked_as)}

    @property
    def knows_limits(self) -> bool:
        """Whether any key is near a limit of its upstream's: then it matters how large a call is."""
        return bool(self._keys.allowances)

    async def enter(self, target: Target, tokens: int | None = None) -> Permit:
        """Return leave to ask ``target`` once, with a call of about so many tokens. Raises TargetAway.

        ``tokens`` unsaid: a call that counts against no limit of the key's.
        """
        watched = self.watch(target)
        breaker, now = watched.breaker, self._clock.monotonic()
        asked = None if target.own is None else target
        if not breaker.condition.is_open:
            return Permit(watched, self._keys.deal(target, now, tokens), breaker.generation, None, asked)
        if breaker.turns_away(now):
            raise TargetAway(breaker.retry_in(now), OPEN, is_busy=False)
        probe = secrets.token_hex(8)
        permit = Permit(watched, self._keys.deal(target, now, tokens), breaker.generation, probe, asked)
        await self._take_probe(permit)
        return permit

    def why_away(self, target: Target) -> TargetAway | None:
        """Return why ``target`` may not be asked now; ``None`` when, for all we know here, it may."""
        breaker = self.watch(target).breaker
        if not breaker.condition.is_open and not self._keys.may_rest(target):
            return None
        now = self._clock.monotonic()
        if breaker.turns_away(now):
            return TargetAway(breaker.retry_in(now), OPEN, is_busy=False)
        return self._keys.why_away(target, now)

    def heard(self, permit: Permit, headers: Mapping[str, str]) -> None:
        """An upstream has begun to answer: note what it says that the key may still ask."""
        if (told := read_limits(headers, self._clock.now())) is not None:
            self._keys.hear(permit.asked or permit.watched.target, permit.api_key, told, self._clock.monotonic())

    def succeeded(self, permit: Permit) -> None:
        """The target answered."""
        if permit.probe is None:
            permit.watched.breaker.count_good(permit.generation, self._clock.monotonic())
        else:
            self._end_probe(permit, Verdict.GOOD)

    def failed(self, permit: Permit, failure: UpstreamFailure, team: str, prompt_characters: int) -> None:
        """The target did not answer ``team``'s call: count it, and put into cooldown what should be left alone."""
        watched, now = permit.watched, self._clock.monotonic()
        if self._keys.cool_down(permit.asked or watched.target, permit.api_key, failure, now):
            self._wake.set()
        # No prompt is to blame for a connection that did not come about, nor is a team's own account.
        is_usual = prompt_characters <= SMALL_PROMPT and permit.asked is None
        verdict, is_small = verdict_of(failure), is_usual or failure.outcome == "connect"
        if permit.probe is not None:
            self._end_probe(permit, verdict, team, is_small)
        elif verdict is Verdict.GOOD:
            watched.breaker.count_good(permit.generation, now)
        elif verdict is Verdict.BAD:
            watched.breaker.count_bad(permit.generation, now, team, is_small)
            self._tell(watched)
            self._wake.set()

    def broke(self, permit: Permit, began: float, failure: UpstreamFailure, team: str, prompt_characters: int) -> None:
        """The answer that was a success when it ``began`` broke in mid-stream: it was none. A probe was judged then."""
        if permit.probe is None:
            if verdict_of(failure) is Verdict.BAD:
                permit.watched.breaker.take_good_back(permit.generation, began)
            self.failed(permit, failure, team, prompt_characters)

    def abandoned(self, permit: Permit) -> None:
        """It is unknown how it would have ended: the client left."""
        if permit.probe is not None:
            self._end_probe(permit, Verdict.NOTHING)

    def has_other_key(self, permit: Permit) -> bool:
        """Whether the target may be asked with another key, now that this one was refused."""
        target = permit.asked or permit.watched.target
        return self._keys.has_good_one(target, self._clock.monotonic(), permit.api_key)

    async def force_open(self, watched: Watched, reason: str) -> None:
        """Ask the target no more, at any gateway, until it is reset."""
        watched.breaker.force_open(self._clock.monotonic(), reason)
        self._tell(watched)
        await self.sync()

    def has_open_at(self, base_url: str) -> bool:
        """Whether the breaker of any target at an address is not closed."""
        return any(self._watched[key].target.endpoint.base_url == base_url for key in self._open)

    def try_again(self, base_url: str) -> None:
        """Let probes through to every target at an address now: another process serves there."""
        now = self._clock.monotonic()
        for watched in map(self._watched.__getitem__, self._open):
            if watched.target.endpoint.base_url == base_url:
                watched.breaker.let_probes_through(now)
        self._wake.set()

    async def reset(self, watched: Watched, reason: str) -> None:
        """Close the target's breaker at every gateway, forget what was counted, and end its cooldowns."""
        watched.breaker.reset(reason)
        self._keys.use_again(watched.target)
        self._tell(watched)
        await self.sync()

    def keys_aside(self, watched: Watched) -> list[Cooldown]:
        """Return why and until when keys are not used at a target; one for each such key."""
        return self._keys.cooldowns_of(watched.target, self._clock.monotonic())

    def states(self) -> list[tuple[tuple[str, str, str], State]]:
        """Return each target's labels and the state of its breaker."""
        now = self._clock.monotonic()
        return [(watched.labels, watched.breaker.state(now)) for watched in self._watched.values()]

    def count_refused_keys(self) -> dict[tuple[str, str], int]:
        """Return how many keys of each provider are in cooldown at all of its endpoints, by why."""
        return self._keys.count_cooldowns(self._clock.monotonic())

    async def run(self) -> None:
        """Tell the other gateways and hear from them, until cancelled."""
        while True:
            self._wake.clear()
            await self.sync()
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY):
                    await self._wake.wait()
                    await asyncio.sleep(TOGETHER)

    async def sync(self) -> None:
        """Tell the other gateways what is news here and learn what is elsewhere, in one trip."""
        async with self._syncing:
            try:
                await self._shared.sync(self._watched.values(), self._keys.cooldowns, self._clock.monotonic)
            except REDIS_AWAY as exc:
                self._stand_alone(exc)
                return
            if self.is_alone:
                log.info("breakers_shared_again")
                self.is_alone = False
            now = self._clock.monotonic()
            for watched in self._watched.values():
                if watched.breaker.others:
                    watched.breaker.judge(now)
                self._tell(watched)

    def _stand_alone(self, exc: BaseException) -> None:
        if not self.is_alone:
            log.warning("breakers_stand_alone", error=repr(exc))
        self.is_alone = True
        for watched in self._watched.values():
            watched.breaker.others = ()
        self._keys.cooldowns.forget_ended(self._clock.monotonic())

    def _goes_last(
        self, watched: Watched, now: float, asked_as: Callable[[Target], Iterable[Target]] | None = None
    ) -> bool:
        targets = (watched.target,) if asked_as is None else asked_as(watched.target)
        return watched.breaker.turns_away(now) or not any(self._keys.has_good_one(one, now) for one in targets)

    async def _take_probe(self, permit: Permit) -> None:
        """Take one of the probes that all gateways share. Raises TargetAway when they are out."""
        watched, breaker = permit.watched, permit.watched.breaker
        breaker.begin_probe()
        try:
            if self.is_alone or await self._shared.take_probe(watched, permit.generation, permit.probe, PROBE_LEASE):
                return
        except REDIS_AWAY:
            return  # our own bound holds
        except asyncio.CancelledError:
            self._end_probe(permit, Verdict.NOTHING)
            raise
        now = self._clock.monotonic()
        breaker.end_probe(permit.generation, Verdict.NOTHING, now)
        breaker.refuse_probes(now + PROBES_TAKEN)
        raise TargetAway(PROBES_TAKEN, PROBED, is_busy=False)

    def _end_probe(self, permit: Permit, verdict: Verdict, team: str = "", is_small: bool = True) -> None:
        watched = permit.watched
        watched.breaker.end_probe(permit.generation, verdict, self._clock.monotonic(), team, is_small)
        self._tell(watched)
        if not self.is_alone:
            self._background.spawn(self._give_probe_back(permit, verdict))

    async def _give_probe_back(self, permit: Permit, verdict: Verdict) -> None:
        watched = permit.watched
        with suppress(*REDIS_AWAY):
            is_good = verdict is Verdict.GOOD
            answered = await self._shared.end_probe(watched, permit.generation, permit.probe, is_good)
            watched.breaker.learn_good_probes(permit.generation, answered)
            self._tell(watched)

    def _tell(self, watched: Watched) -> None:
        """Note a breaker that moved: in the log and the metrics if it moved here, and for the other gateways."""
        breaker, key = watched.breaker, watched.target.key
        if self._watched.get(key) is not watched:
            return  # the configuration has lost it
        is_open = breaker.condition.is_open
        if is_open == (key in self._open) and not breaker.transitions:
            return
        (self._open.add if is_open else self._open.discard)(key)
        if breaker.transitions:
            breaker.transitions = 0
            provider, endpoint, model = watched.labels
            state = State.OPEN if is_open else State.CLOSED
            self.transitions[provider, endpoint, model, state.value] += 1
            write = log.warning if is_open else log.info
            reason = breaker.condition.reason
            write(f"breaker_{state.value}", provider=provider, endpoint=endpoint, model=model, reason=reason)
            self._wake.set()
