# What gateways tell each other of upstreams, by way of Redis (breaker.lua): conditions, reports, what is in cooldown,
# and the probes that are out. Moments cross as seconds from now, by Redis's clock.

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from hashlib import blake2s
from importlib import resources
from typing import Any

import msgspec
from msgspec import Struct
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.upstreams.resilience.breaker import Breaker, Condition
from gateway.upstreams.resilience.cooldown import Cooldown, Cooldowns
from gateway.upstreams.resilience.window import Tally
from protocol.serving.deadlines import running_timeout
from router.catalog.targets import Target

PREFIX = "tollgate:{breakers}"
NOT_OURS = (msgspec.DecodeError, UnicodeDecodeError)
DEADLINE = 0.25  # seconds for any call to Redis
FRESH = 3.0  # seconds for which a gateway's report counts; a living one renews it every half second

SCRIPT = resources.files(__package__).joinpath("breaker.lua").read_text()


class Watched:
    """One target with its breaker. ``id`` names it in paths and in Redis."""

    __slots__ = ("breaker", "id", "target")

    def __init__(self, target: Target, breaker: Breaker) -> None:
        self.target, self.breaker = target, breaker
        self.id = blake2s(target.key.encode(), digest_size=8).hexdigest()

    @property
    def labels(self) -> tuple[str, str, str]:
        """Provider, endpoint and model, as metrics and logs name them."""
        model, endpoint = self.target.model, self.target.endpoint
        return model.provider, f"{endpoint.region} {endpoint.base_url}", model.name


class SharedBreakers:
    """One process's voice among the gateways. Every call may raise one of REDIS_AWAY."""

    def __init__(self, redis: Redis, *, deadline: float = DEADLINE) -> None:
        self._script, self._deadline = redis.register_script(SCRIPT), deadline
        self._id = secrets.token_hex(6)

    async def sync(self, all_watched: Iterable[Watched], cooldowns: Cooldowns, monotonic: Callable[[], float]) -> None:
        """Tell what is news and what was counted; take over what the gateways agree on."""
        watched = {one.id: one for one in all_watched}
        now = monotonic()
        offered = {one.id: one.breaker.generation for one in watched.values() if one.breaker.is_news}
        told = {name: cooldowns.find(name, now) for name in cooldowns.news}
        said = {
            "gateway": self._id,
            "fresh": FRESH,
            "reports": [report for one in watched.values() if (report := _report(one, now)) is not None],
            "conditions": {name: _offer(watched[name].breaker.condition, now) for name in offered},
            "asides": [
                [name, cooldown.until - now, cooldown.why] if cooldown else [name, 0, ""]
                for name, cooldown in told.items()
            ],
        }
        answer = _understood(await self._call("sync", said))
        now = monotonic()
        cooldowns.agree({name: Cooldown(now + seconds, why) for name, seconds, why in answer.asides}, told)
        conditions = dict(answer.conditions)
        for name, one in watched.items():
            if one.breaker.generation == offered.get(name):
                one.breaker.is_news = False
            if (shared := conditions.get(name)) is not None:
                one.breaker.adopt(shared.condition(now))
            elif one.breaker.generation:
                one.breaker.is_news = True  # Redis has lost it
        _share_reports(watched, answer.reports)

    async def take_probe(self, watched: Watched, generation: int, token: str | None, lease: float) -> bool:
        """Take one of the probes that all gateways share, for ``lease`` seconds; False when they are all out."""
        said = {
            "target": watched.id,
            "g": generation,
            "most": watched.breaker.policy.probes,
            "lease": lease,
            "token": token,
        }
        return bool(await self._call("probe", said))

    async def end_probe(self, watched: Watched, generation: int, token: str | None, is_good: bool) -> int:
        """Give a probe back and return how many were answered, of all gateways."""
        said = {"target": watched.id, "g": generation, "token": token, "good": is_good}
        return int(await self._call("probed", said))

    async def _call(self, verb: str, said: object) -> Any:
        async with running_timeout(self._deadline):
            return await self._script(keys=[PREFIX], args=[verb, msgspec.json.encode(said)])


class _Offered(Struct, rename={"generation": "g"}):
    generation: int
    open: bool
    forced: bool
    by_hand: bool
    opened_ago: float
    retry_in: float
    reason: str

    def condition(self, now: float) -> Condition:
        return Condition(
            generation=self.generation,
            is_open=self.open,
            is_forced=self.forced,
            is_by_hand=self.by_hand,
            opened_at=now - self.opened_ago,
            retry_at=now + self.retry_in,
            reason=self.reason,
        )


class _Answer(Struct, array_like=True):
    conditions: list[tuple[str, _Offered]]
    reports: list[tuple[str, list[str] | None]]
    asides: list[tuple[str, float, str]]


class _Report(Struct, array_like=True):
    generation: int
    tallies: tuple[Tally, Tally, Tally]  # as many as Tallies has


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_report = msgspec.json.Decoder(_Report).decode


def _understood(answer: bytes) -> _Answer:
    """Return what the script answered. Raises RedisError for what no version of the gateway can have written."""
    try:
        return _decode_answer(answer)
    except NOT_OURS as exc:
        raise RedisError(f"what Redis keeps of breakers makes no sense: {exc}") from exc


def _offer(one: Condition, now: float) -> _Offered:
    ago, wait = now - one.opened_at, one.retry_at - now
    return _Offered(one.generation, one.is_open, one.is_forced, one.is_by_hand, ago, wait, one.reason)


def _report(watched: Watched, now: float) -> list[Any] | None:
    breaker = watched.breaker
    if not breaker.window or breaker.condition.is_open:
        return None
    tallies = breaker.window.tallies(now)
    report = msgspec.json.encode([breaker.generation, tallies]).decode()
    return [watched.id, tallies[-1].failures > 0, report]


def _share_reports(watched: dict[str, Watched], reports: list[tuple[str, list[str] | None]]) -> None:
    told = dict(reports)
    for name, one in watched.items():
        texts = told.get(name) or ()
        one.breaker.others = _sum(one.breaker, texts) if texts else ()


def _sum(breaker: Breaker, texts: Iterable[str]) -> tuple[Tally, ...]:
    total: tuple[Tally, ...] = ()
    for text in texts:
        try:
            report = _decode_report(text)
        except NOT_OURS:  # of a gateway of another version
            continue
        if report.generation == breaker.generation:
            total = tuple(map(Tally.__add__, total, report.tallies)) if total else report.tallies
    return total
