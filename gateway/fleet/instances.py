# The watcher of our own engine's replicas: polls each every few seconds, stores its report, and records the time that
# passed as usage. Every gateway has one; one at a time polls, and two that poll at once count nothing twice.

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing

import msgspec
import structlog
from msgspec import Struct
from redis.asyncio import Redis

from billing.core.store_errors import POSTGRES_AWAY
from billing.ledger.instance_samples import Look, book_look
from billing.quotas.rate_wire import REDIS_AWAY
from gateway.core.clock import Clock
from gateway.core.settings import ProviderSettings, Settings
from gateway.fleet.rollouts import read_name
from gateway.inference.edition import Edition
from gateway.storage.database import Database
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.wire.base import UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamError, UpstreamFailure
from protocol.decoding import NOT_JSON
from protocol.serving.deadlines import running_timeout
from protocol.serving.engine_load import EngineLoad
from router.catalog.catalog import Catalog
from router.catalog.targets import Endpoint, ModelSpec

EVERY = 10.0  # seconds between looks
STALE_AFTER = 3 * EVERY  # seconds without a look, after which a replica may be gone
TURN = "tollgate:instances-turn"  # Redis key: the gateway that sets it looks, the others wait for the next turn
PATIENCE = 2.0  # seconds for one replica to answer
LONGEST_REPORT = 64 * 1024  # bytes
SECOND = 1_000_000  # microseconds

log = structlog.get_logger()


class Replica(Struct, frozen=True):
    """One address of our own engine, under the first provider that names it."""

    provider: ProviderSettings
    endpoint: Endpoint
    names: frozenset[str]  # of every provider that names it


class InstanceWatcher:
    """Looks at every self-hosted endpoint of the configuration until cancelled."""

    def __init__(
        self,
        edition: Edition,
        client: UpstreamClient,
        database: Database,
        redis: Redis,
        clock: Clock,
        every: float = EVERY,
        with_sleepers: Callable[[Settings], Settings] = lambda settings: settings,
    ) -> None:
        """``with_sleepers``: adds the replicas that sleep to those that are asked. Their time counts, too."""
        self._edition = edition
        self._client = client
        self._database = database
        self._redis = redis
        self._clock = clock
        self._every = every
        self._with_sleepers = with_sleepers
        self._unreachable: set[str] = set()  # base URLs; said once

    def follow(self, edition: Edition) -> None:
        """Look at the endpoints of another configuration from the next look on."""
        self._edition = edition
        self._unreachable &= {replica.endpoint.base_url for replica in self._replicas()}

    async def run(self) -> None:
        """Look whenever it is this gateway's turn."""
        while True:
            if self._replicas() and await self.takes_turn():
                await self.look_once()
            await asyncio.sleep(self._every)

    async def look_once(self) -> list[Look]:
        """Look at every replica and return the looks that were new to the database."""
        return [look for look in await asyncio.gather(*map(self._look_at, self._replicas())) if look is not None]

    def _replicas(self) -> list[Replica]:
        return replicas_of(self._with_sleepers(self._edition.settings).providers.values())

    async def takes_turn(self) -> bool:
        """Whether no gateway has looked lately. It only saves work: without Redis every gateway looks."""
        try:
            lasts = round(self._every * 950)  # milliseconds; a little less than until the next turn
            return bool(await self._redis.set(TURN, "taken", nx=True, px=lasts))
        except REDIS_AWAY:
            return True

    async def _look_at(self, replica: Replica) -> Look | None:
        address = replica.endpoint.base_url
        try:
            report = await ask_load(self._client, self._edition.providers, replica)
        except UpstreamFailure as exc:
            if address not in self._unreachable:
                log.warning("instance_unreachable", endpoint=address, error=str(exc))
            self._unreachable.add(address)
            return None
        if address in self._unreachable:
            self._unreachable.discard(address)
            log.info("instance_reachable", endpoint=address, instance_id=report.instance_id)
        meant = read_name(report.instance_id.rpartition("-")[0])
        if meant is not None and meant[0] in self._edition.settings.providers and meant[0] not in replica.names:
            return None  # it took another pool's model meanwhile: by that one's price its time is booked
        look = look_from(report, replica, self._edition.catalog, self._clock.now())
        try:
            async with self._database.begin() as connection:
                return look if await book_look(connection, look) else None
        except POSTGRES_AWAY as exc:  # the next look catches up
            log.warning("instance_not_booked", instance_id=look.instance_id, error=repr(exc))
            return None


async def ask_load(client: UpstreamClient, providers: ProviderRegistry, replica: Replica) -> EngineLoad:
    """Return what a replica says of itself. Raises UpstreamFailure."""
    key = providers.next_key(replica.provider.name)
    headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {})
    url = replica.endpoint.base_url.removesuffix("/v1") + "/load"
    try:
        async with running_timeout(PATIENCE):
            request, connect = UpstreamRequest("GET", url, headers, b""), replica.provider.timeouts.connect
            with closing(await client.send(request, connect, PATIENCE)) as response:
                if response.status != 200:
                    raise UpstreamError(f"It answered {response.status}.", outcome=f"status_{response.status}")
                return read_report(await response.read(LONGEST_REPORT))
    except TimeoutError as exc:
        raise UpstreamError("It did not answer in time.", outcome="timeout") from exc
    except NOT_JSON as exc:
        raise UpstreamError(f"It said something that is no report: {exc}", outcome="malformed") from exc


def replicas_of(providers: Iterable[ProviderSettings]) -> list[Replica]:
    """Return the self-hosted endpoints, each address once."""
    known: dict[str, Replica] = {}
    everyone = [*providers]
    for provider in everyone:
        # What computes prompts for another provider is there for that one's models.
        names = {one.name for one in everyone if one.prefill is not None and one.prefill.provider == provider.name}
        for endpoint in provider.endpoints if provider.self_hosted else ():
            first = known.get(endpoint.base_url, Replica(provider, endpoint, frozenset()))
            known[endpoint.base_url] = msgspec.structs.replace(first, names=first.names | {provider.name} | names)
    return list(known.values())


def look_from(report: EngineLoad, replica: Replica, catalog: Catalog, now: float) -> Look:
    """Return what is recorded of a report, at the price that the catalogue has now (unix seconds)."""
    model = model_of(report.names, replica.names, catalog)
    return Look(
        instance_id=report.instance_id,
        provider=replica.provider.name,
        endpoint=f"{replica.endpoint.region} {replica.endpoint.base_url}",
        model=model.name if model is not None else None,
        gpus=report.gpus,
        gpu_hour_nanousd=model.gpu_hour_nanousd if model is not None else None,
        alive_us=round(report.uptime_seconds * SECOND),
        busy_us=round(report.busy_seconds * SECOND),
        seen_at=now,
        load=msgspec.to_builtins(report),
    )


def model_of(served: Sequence[str], providers: frozenset[str], catalog: Catalog) -> ModelSpec | None:
    """Return the catalogue's model that a replica serves, rather than an adapter of it; of several the first that says
    what its GPU costs."""
    found = [
        one
        for name in served
        for model in catalog.models.values()
        for one in model.everywhere
        if one.provider in providers and one.upstream_model == name
    ]
    return next((model for model in found if model.gpu_hour_nanousd is not None), found[0] if found else None)


read_report = msgspec.json.Decoder(EngineLoad).decode
