# What `tollgate doctor` looks at outside: whether each provider is there and takes each of its keys (the list of its
# models is asked for, which costs nothing), and whether our own engines serve what the catalogue says.

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from billing.quotas.rate_wire import REDIS_AWAY
from gateway.core.clock import Clock
from gateway.core.settings import ProviderSettings, Settings
from gateway.doctor.findings import Finding, fault, ok, warning
from gateway.fleet.discovery import admissions, announced_in, joined
from gateway.fleet.instances import ask_load, replicas_of
from gateway.fleet.membership import Membership
from gateway.identity.issuer import Issuer, IssuerAway
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.issuers import ask_by
from gateway.upstreams.registry import FORMATS, ProviderRegistry
from gateway.upstreams.wire.base import Asking, UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamFailure
from protocol.chat import ChatRequest, Message
from protocol.serving.engine_load import EngineLoad
from protocol.serving.redis_client import open_redis
from router.catalog.targets import Capability, ModelSpec, Target, TeamKeys

WITHIN = 10.0  # seconds for each answer
LISTS = {"openai": "/models", "anthropic": "/v1/models", "gemini": "/models", "bedrock": "/"}
GREETING = ChatRequest(model="any", messages=(Message("user", "Hi"),), max_tokens=1)


async def look_at_upstreams(settings: Settings) -> list[Finding]:
    """Return what each provider, with each of its keys, and each replica of our own engine says."""
    settings, announced = await _with_announced(settings)
    client, registry = UpstreamClient(), ProviderRegistry(settings.providers)
    try:
        looks = [
            _look_at_key(client, registry, replace(target, own=own), key, part)
            for provider in settings.providers.values()
            if not provider.self_hosted
            for target in _one_at_each_endpoint(settings, provider)
            for part, key, own in _keys_of(provider)
        ]
        return [*await asyncio.gather(*looks), *announced, *await _look_at_engines(client, registry, settings)]
    finally:
        await client.close()


def request_of_models(
    registry: ProviderRegistry, target: Target, key: str | None, token: str | None
) -> UpstreamRequest:
    """Return the request for the list of an endpoint's models, with the credentials that its format has."""
    provider = registry.settings_at(target)
    asking = Asking(
        request=GREETING, target=target, api_key=key, token=token, streams=False, api_version=provider.api_version
    )
    built = registry.dress(FORMATS[provider.format].build_request(asking), target)
    azure = f"/openai/models?api-version={provider.api_version}" if provider.api_version else None
    url = target.endpoint.base_url + (azure or LISTS[provider.format])
    return replace(built, method="GET", url=url, body=b"")


def _keys_of(provider: ProviderSettings) -> Iterator[tuple[str, str | None, TeamKeys | None]]:
    """Yield each key that the file has for a provider, with its name and, of a team's own, whose it is; once none,
    where it is asked with none."""
    several, teams = len(provider.api_keys), provider.team_keys
    for number, key in enumerate(provider.api_keys or ((None,) if teams is None else ())):
        yield f"{provider.name}, key {number + 1} of {several}" if several > 1 else provider.name, key, None
    for team, keys in (teams or {}).items():
        for key in keys:
            yield f"{provider.name}, key of {team}", key, TeamKeys(team)


async def _look_at_key(
    client: UpstreamClient, registry: ProviderRegistry, target: Target, key: str | None, part: str
) -> Finding:
    provider, place = registry.settings_at(target), target.endpoint.base_url
    try:
        token = await registry.token_for(target, client, time.monotonic())
    except UpstreamFailure as exc:
        return fault(part, f"no token: {exc.message}", "correct its oauth, google_key_file or token_file")
    began = time.perf_counter()
    try:
        async with asyncio.timeout(WITHIN):
            answer = await client.send(
                request_of_models(registry, target, key, token), provider.timeouts.connect, WITHIN
            )
            answer.close()
    except (UpstreamFailure, TimeoutError) as exc:
        why = getattr(exc, "message", "").rstrip(".") or "not in time"
        words = f"{place} does not answer: {why}"
        return fault(part, words, "is its base_url right, and may this machine go there (DNS, firewall, proxy)?")
    took = f"{1000 * (time.perf_counter() - began):.0f} ms"
    if provider.format == "bedrock":  # its runtime lists no models
        return ok(part, f"{place} answers, in {took}; whether it takes the credentials only --live can tell")
    match answer.status:
        case 200:
            return ok(part, f"{place} takes it, in {took}")
        case 401 | 403:
            return fault(part, f"{place} refuses it ({answer.status})", "make a new key there and set it")
        case 429:
            return warning(part, f"{place} takes no more now (429)", "look at the account's limits and credit there")
        case 404:
            remedy = "is base_url right? Its models are only known to be there once `doctor --live` has called one"
            return warning(part, f"{place} lists no models (404)", remedy)
        case status:
            return warning(
                part, f"{place} answers {status} to the list of its models", "look at the provider's status page"
            )


async def _with_announced(settings: Settings) -> tuple[Settings, list[Finding]]:
    """Return the settings with the replicas that announce themselves, and what is wrong with their announcements."""
    found: list[Finding] = []
    pools = [Membership(admission) for admission in admissions(settings)]
    if not pools:
        return settings, found
    async with open_redis(settings.redis_url, timeout=WITHIN) as redis:
        try:
            announced = await announced_in(redis, [pool.admission.pool for pool in pools])
        except REDIS_AWAY:
            return settings, found  # which is said of Redis
    for pool, heard in zip(pools, announced, strict=True):
        pool.hear(heard, time.monotonic(), time.time())
        part = f"pool {pool.admission.pool}"
        for member in pool.members():
            if member.refused is not None:
                words = f"{member.said.base_url} is not asked: {member.refused}"
                found.append(fault(part, words, "docs/operations/fleet.md says who may announce"))
        if pool.unsigned:
            words = f"{pool.unsigned} announcements are signed with none of fleet.secrets"
            found.append(fault(part, words, "give those engines one of them as TOLLGATE_FLEET_SECRET"))
        if not pool.members():
            remedy = "start engines with --fleet-pool; until then its endpoints and fallbacks answer"
            found.append(warning(part, "no replica announces itself", remedy))
    return joined(settings, {pool.admission.pool: pool.base_urls() for pool in pools}), found


async def _look_at_engines(client: UpstreamClient, registry: ProviderRegistry, settings: Settings) -> list[Finding]:
    found = []
    for replica in replicas_of(settings.providers.values()):
        part, place = f"engine {replica.provider.name}", replica.endpoint.base_url
        try:
            load = await ask_load(client, registry, replica)
        except UpstreamFailure as exc:
            remedy = "start it, or correct its base_url and secret; calls go on to the other replicas and fallbacks"
            found.append(fault(part, f"{place}: {exc.message}", remedy))
            continue
        asked = [one for one in settings.models.values() if one.provider in replica.names]
        found.append(finding_of_engine(part, place, load, asked))
    return found


def finding_of_engine(part: str, place: str, load: EngineLoad, asked: Sequence[ModelSpec]) -> Finding:
    """Return whether what a replica says is what the catalogue's models ask of it."""
    served, told = {one.upstream_model for one in asked}, ", ".join(load.names)
    if served and served.isdisjoint(load.names):
        words = f"{place} serves {told}, and the catalogue asks for {', '.join(sorted(served))}"
        return fault(part, words, "correct upstream_model, or --served-model-name of the engine")
    if load.status != "active":
        return warning(part, f"{place} is {load.status}", "it takes nothing new: start another, or end it")
    sends = {one.name for one in asked if Capability.VISION in one.capabilities and one.upstream_model in load.names}
    if sends and load.input_modalities and "image" not in load.input_modalities:
        words = f"{place} reads no pictures, and {', '.join(sorted(sends))} has vision among its abilities"
        return fault(part, words, "leave vision out; else see docs/operations/engine.md, Pictures: the model, Pillow")
    if asked and "image" in load.input_modalities and not sends and not any(one.follows_engine for one in asked):
        remedy = "add vision to the abilities of its model, or start it with --max-images 0"
        return warning(part, f"{place} reads pictures, and no model of the catalogue sends it any", remedy)
    return ok(part, f"{place} serves {told}: {load.running} run, {load.queue_depth} wait")


def _one_at_each_endpoint(settings: Settings, provider: ProviderSettings) -> list[Target]:
    """Return a target for each endpoint, with a model of the provider, if it has one."""
    models = [one for model in settings.models.values() for one in model.everywhere if one.provider == provider.name]
    return [Target(models[0], endpoint) for endpoint in provider.endpoints] if models else []


async def look_at_issuers(settings: Settings) -> list[Finding]:
    """Return what each issuer of `sign_in` and `jwt_auth` says."""
    named = {(each.issuer, each.jwks_url): "jwt_auth" for each in settings.jwt_auth}
    if settings.sign_in is not None:
        named[settings.sign_in.issuer, None] = "sign_in"
    client = UpstreamClient()
    try:
        asked = ((part, Issuer(name, ask_by(client), Clock(), url)) for (name, url), part in named.items())
        return await asyncio.gather(*(_look_at(part, issuer) for part, issuer in asked))
    finally:
        await client.close()


async def _look_at(part: str, issuer: Issuer) -> Finding:
    try:
        await issuer.read_keys()
    except IssuerAway as exc:
        remedy = "is its URL letter by letter the issuer's, and may this machine go there?"
        return fault(part, f"{issuer.name}: {exc}", remedy)
    return ok(part, f"{issuer.name} answers; keys that it signs with: {issuer.number_of_keys}")
