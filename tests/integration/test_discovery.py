# How announced replicas become endpoints: by the next edition, beside those that the file names; and what stays as it
# was while Redis is away.

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from gateway.core.settings import Fleet, Pool, ProviderSettings, Settings
from gateway.doctor.upstreams import look_at_upstreams
from gateway.fleet.discovery import Discovery
from gateway.fleet.membership import LATE
from gateway.fleet.rollouts import Rolling, rollout_key
from gateway.inference.edition import Editions
from protocol.serving.announcements import Announcement, pool_key, signed
from protocol.serving.redis_client import open_redis
from router.catalog.targets import Endpoint
from router.replicas import VersionShare
from tests.support.clock import SetClock
from tests.support.house import model, settings_for
from tests.support.redis_proxy import RedisProxy, Way
from tests.support.waiting import until_found

SECRET = "a secret of the fleet 0123"
LISTED, FOUND, OTHER = "http://10.0.0.1:8000/v1", "http://10.0.0.2:8100/v1", "http://10.0.0.3:8100/v1"
ASLEEP = "http://10.0.0.4:8100/v1"


class Gateway:
    """The part of a gateway that finds replicas: editions that are nothing but their settings."""

    def __init__(self, redis: Redis, settings: Settings) -> None:
        self.redis, self.clock, self.number = redis, SetClock(), 0
        self.shares: dict[str, VersionShare] = {}
        self.discovery = Discovery(redis, self.clock, settings.data_dir / "fleet.json", self.shares)

        def edition(said: Settings, providers: object) -> Any:
            return SimpleNamespace(settings=said, providers=providers)

        self.editions = Editions(edition(settings, None), edition, self.discovery.join)
        self.discovery.begin(self.editions)

    async def announce(self, instance: str = "a", base_url: str = FOUND, state: str = "active") -> None:
        """Put a heartbeat into Redis."""
        self.number += 1
        facts: dict[str, Any] = {"pool": "own", "model": "tiny", "state": state, "base_url": base_url}
        said = Announcement(instance_id=instance, number=self.number, sent_at=self.clock.now(), **facts)
        await self.redis.hset(pool_key("own"), instance, signed(said, SECRET))

    def asked(self) -> list[str]:
        """Return the endpoints of calls that begin now."""
        return [one.base_url for one in self.editions.current.settings.providers["own"].endpoints]


@pytest.fixture
def settings(tmp_path: Any) -> Settings:
    """A pool with one address in the file."""
    own = ProviderSettings(name="own", format="openai", self_hosted=True, endpoints=(Endpoint("here", LISTED),))
    fleet = Fleet(secrets=(SECRET,), pools={"own": Pool(region="there")})
    more = {"providers": {"own": own}, "models": {"tiny": model("tiny", "own")}, "auto": {}, "aliases": {}}
    return settings_for("", "", "", tmp_path, **more, fleet=fleet)


@pytest.fixture
async def way(redis_url: str) -> AsyncIterator[RedisProxy]:
    """The way to Redis, which can be cut."""
    proxy = RedisProxy(redis_url)
    await proxy.start()
    yield proxy
    await proxy.stop()


async def test_replicas_stand_beside_those_of_the_file(redis: Redis, settings: Settings) -> None:
    """In the pool's region, and once, one that sleeps for its time alone; through a reload, until the file has no such
    pool; running calls keep theirs."""
    gateway = Gateway(redis, settings)
    first = gateway.editions.current
    await gateway.announce()
    await gateway.announce("b", LISTED)
    await gateway.announce("c", ASLEEP, state="sleeping")
    await gateway.discovery.look_once()
    found = gateway.editions.current
    await gateway.discovery.look_once()
    again = gateway.editions.current
    counted = gateway.discovery.with_sleepers(found.settings).providers["own"].endpoints
    reloaded = replace(settings, aliases={"other": "tiny"})
    gateway.editions.change(reloaded)
    after_reload = gateway.asked(), gateway.editions.said
    gateway.editions.change(replace(settings, fleet=None))
    without = gateway.asked()
    gateway.editions.change(settings)

    assert found.settings.providers["own"].endpoints == (Endpoint("here", LISTED), Endpoint("there", FOUND))
    assert counted == (*found.settings.providers["own"].endpoints, Endpoint("there", ASLEEP))
    assert again is found and [one.base_url for one in first.settings.providers["own"].endpoints] == [LISTED]
    assert after_reload == ([LISTED, FOUND], reloaded)
    assert without == [LISTED] == gateway.asked()


async def test_conversations_are_shared_as_a_controller_says(redis: Redis, settings: Settings) -> None:
    """Within a look; what stands there of another release is nothing. Each replica shows its version and its share."""
    gateway, (old, new) = Gateway(redis, settings), ("0" * 11 + "1", "0" * 11 + "2")
    rolling = Rolling(state="standing", revision=new, kept=old, share=0.25, since=0.0, due_at=None)
    told = []
    await gateway.announce(f"own.{old}.00000001-00000000", FOUND)
    await gateway.announce(f"own.{new}.00000002-00000000", OTHER)
    await gateway.announce("by-hand", LISTED)
    for value in (b"", msgspec.json.encode(rolling), b'{"state": "of another release"}'):
        await redis.set(rollout_key("own"), value)
        await gateway.discovery.look_once()
        shown = {one.member.said.base_url: (one.revision, one.share) for one in gateway.discovery.replicas()}
        told.append((dict(gateway.shares), shown, gateway.discovery.count_rollouts()))

    assert told[0] == told[2] == ({}, {FOUND: (old, None), OTHER: (new, None), LISTED: (None, None)}, {})
    assert told[1] == (
        {"own": VersionShare(0.25, frozenset([OTHER]))},
        {FOUND: (old, 0.75), OTHER: (new, 0.25), LISTED: (None, 0.75)},
        {"own": ("standing", 0.25)},
    )


async def test_what_cannot_be_followed_is_tried_again(redis: Redis, settings: Settings) -> None:
    """An edition that fails leaves the one before, and the next look makes another."""
    gateway, refused = Gateway(redis, settings), [1]

    def refuse_once(_: object) -> None:
        if refused:
            refused.pop()
            raise RuntimeError("this cannot be followed")

    gateway.editions.follow(refuse_once)
    await gateway.announce()

    with pytest.raises(RuntimeError):
        await gateway.discovery.look_once()
    assert gateway.asked() == [LISTED] and not gateway.discovery.replicas()[0].takes_calls
    await gateway.discovery.look_once()
    assert gateway.asked() == [LISTED, FOUND]


async def test_replicas_stay_while_redis_is_away(redis: Redis, way: RedisProxy, settings: Settings) -> None:
    """However long, and however soon again; once it is back, they have time to be heard, and what is dead goes."""
    async with open_redis(way.url, timeout=1.0) as redis_by_the_way:
        gateway = Gateway(redis_by_the_way, settings)
        gateway.redis = redis
        for _ in range(2):  # what was heard once may have been dead
            await gateway.announce()
            await gateway.announce("b", OTHER)
            await gateway.discovery.look_once()

        async def is_back() -> bool:
            await gateway.discovery.look_once()
            return not gateway.discovery.is_away

        for _ in range(2):
            way.turn(Way.CUT)
            await gateway.discovery.look_once()
            gateway.clock.move(3600)
            await gateway.discovery.look_once()
            away = gateway.discovery.is_away, gateway.asked()
            way.turn(Way.OPEN)
            await until_found(is_back)
            back = gateway.asked()
        for _ in range(3):
            gateway.clock.move(LATE / 2)
            await gateway.announce()
            await gateway.discovery.look_once()

    assert away == (True, [LISTED, FOUND, OTHER])
    assert back == [LISTED, FOUND, OTHER]
    assert gateway.asked() == [LISTED, FOUND]


async def test_a_start_without_redis_goes_by_what_was_heard_last(
    redis: Redis, way: RedisProxy, settings: Settings
) -> None:
    """For a day: then the address may be another's. What nobody signed, or is damaged, says nothing; and what is heard
    when Redis is back counts alone."""
    kept = settings.data_dir / "fleet.json"
    async with open_redis(way.url, timeout=1.0) as redis_by_the_way:

        async def asked_at_a_start(later: float = 0.0, content: bytes | None = None) -> list[str]:
            starting = Gateway(redis_by_the_way, settings)
            starting.clock.move(later)
            kept.write_bytes(signed_content if content is None else content)
            await starting.discovery.look_once()
            return starting.asked()

        gateway = Gateway(redis, settings)
        await gateway.announce()
        await gateway.announce("b", OTHER)
        await gateway.discovery.look_once()
        for _ in range(3):
            gateway.clock.move(LATE / 2)
            await gateway.announce()
            await gateway.discovery.look_once()
        signed_content = kept.read_bytes()
        way.turn(Way.CUT)
        starts = [await asked_at_a_start(), await asked_at_a_start(90_000.0)]
        [heard] = msgspec.json.decode(signed_content, type=dict[str, list[bytes]])["own"]
        changed = msgspec.json.encode({"own": [heard.replace(b"10.0.0.2", b"10.0.0.9")]})
        starts += [await asked_at_a_start(content=changed), await asked_at_a_start(content=b"{")]
        kept.unlink()
        nothing = Gateway(redis_by_the_way, settings)
        await nothing.discovery.look_once()
        starts.append(nothing.asked())

        kept.write_bytes(signed_content)
        back = Gateway(redis_by_the_way, settings)
        await back.discovery.look_once()
        way.turn(Way.OPEN)
        back.redis, back.number = redis, gateway.number
        await back.announce("c", OTHER)

        async def is_back() -> bool:
            back.clock.move(LATE / 2)
            await back.announce("c", OTHER)
            await back.discovery.look_once()
            return back.asked() == [LISTED, OTHER]

        await until_found(is_back)

    assert starts == [[LISTED, FOUND], [LISTED], [LISTED], [LISTED], [LISTED]]
    assert kept.stat().st_mode & 0o777 == 0o600


async def test_the_doctor_looks_at_pools(redis: Redis, redis_url: str, settings: Settings) -> None:
    """It asks the replicas that announce themselves, and names those that gateways do not go by."""
    own = replace(settings.providers["own"], endpoints=())
    settings = replace(settings, redis_url=redis_url, providers={"own": own})
    [nothing] = await look_at_upstreams(settings)
    for instance, secret, tiny in (("a", SECRET, "tiny"), ("b", SECRET, "other"), ("c", "another secret", "tiny")):
        facts: dict[str, Any] = {"pool": "own", "state": "active", "base_url": f"http://127.0.0.1:9/{instance}/v1"}
        said = Announcement(instance_id=instance, model=tiny, number=1, sent_at=time.time(), **facts)
        await redis.hset(pool_key("own"), instance, signed(said, secret))
    refused, unsigned, asked = await look_at_upstreams(settings)

    assert (nothing.part, nothing.words) == ("pool own", "no replica announces itself")
    assert "http://127.0.0.1:9/b/v1 is not asked: it serves other, and calls ask for tiny" in refused.words
    assert unsigned.words == "1 announcements are signed with none of fleet.secrets"
    assert asked.part == "engine own" and asked.words.startswith("http://127.0.0.1:9/a/v1: ")
