# The section `fleet` of tollgate.yaml: pools whose replicas announce themselves, and whose announcements are believed.
# A stranger who could announce an address would be sent prompts and the engine's key, so a secret is always demanded.

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import IPv4Network, IPv6Network

from msgspec.structs import replace

from gateway.config.fields import Faults, Fields, Read, complain, meant
from gateway.config.readers import integer, list_of, network, number, secrets, strong_secret, struct_of, text
from gateway.config.tree import Node, Scalar, Section
from gateway.core.settings import EngineSpec, Fleet, Pool, ProviderSettings, Rollout, Scaling
from router.catalog.targets import ModelSpec

LARGEST_POOL = 1000  # replicas
MOST_GPUS = 64  # of a replica
ROLES = ("both", "prefill", "decode")
EXCHANGE = "--kv-transfer-address"
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?")
# Flags of the engine that are not for the file, and where what they say comes from.
GIVEN = {
    "--model": "model",
    "--port": "any free one",
    "--fleet-pool": "the pool's name",
    "--fleet-redis": "redis_url",
    "--fleet-address": "each replica has its own",
    "--instance-id": "each replica has its own",
    "--warm-up": "warm_up",
    "--drain-seconds": "rollout.drain",
    "--role": "the pool's role",
    "--ranks-meet-at": "where Ray places the first rank",
    "--api-key": "the provider's api_keys, by the environment: all users of a machine see arguments",
}

_replicas = integer(0, LARGEST_POOL)
_scaling = struct_of(Scaling, min=_replicas, max=integer(1, LARGEST_POOL), headroom=number(0, 10), asleep=_replicas)


def _role(node: Node, faults: Faults) -> str | None:
    role = text(node, faults)
    if role is not None and role not in ROLES:
        return complain(node, faults, f"expected {', '.join(ROLES)}; {meant(role, ROLES)}")
    return role


def _read_scaling(node: Node, faults: Faults) -> Scaling | None:
    scaling = _scaling(node, faults)
    if scaling is not None and scaling.min > scaling.max:
        return complain(node, faults, f"min is {scaling.min} and max is {scaling.max}: min is at most max")
    return scaling


def _argument(node: Node, faults: Faults) -> str | None:
    """Read one word of the engine's command line: a number is one, too."""
    if not isinstance(node, Scalar) or node.is_broken:
        return text(node, faults)
    said = node.text.partition("=")[0]  # the engine takes the beginning of a flag for the flag
    if said.startswith("--") and (flag := next((one for one in GIVEN if one.startswith(said)), None)):
        return complain(node, faults, f"{flag} is given by the controller: {GIVEN[flag]}")
    if "\0" in node.text:
        return complain(node, faults, "an argument of a program holds no zero byte")
    return node.text


def _variable(node: Node, faults: Faults) -> str | None:
    """Read the name of a variable, or the beginning of some."""
    name = text(node, faults)
    if name is not None and VARIABLE.fullmatch(name) is None:
        words = "expected the name of a variable, such as AWS_PROFILE, or AWS_* for all that begin so; values stay out"
        return complain(node, faults, words)
    return name


_engine = struct_of(
    EngineSpec,
    arguments=list_of(_argument, what="arguments"),
    environment=list_of(_variable, what="names"),
    gpus=integer(0, MOST_GPUS),
    warm_up=list_of(text, what="prompts"),
)
_rollout = struct_of(Rollout, max_slowdown=number(1, 100))
_pool = struct_of(Pool, role=_role, scaling=_read_scaling, engine=_engine, rollout=_rollout)


def _read_pool(node: Node, faults: Faults) -> Pool | None:
    pool = _pool(node, faults)
    if pool is None or pool.engine is None:
        return pool
    if pool.scaling is None:
        return complain(node, faults, "engine without scaling: how many replicas? scaling: {min: N, max: N}")
    if pool.role == "both":
        return pool
    if not any(word.partition("=")[0] == EXCHANGE for word in pool.engine.arguments):
        return complain(node, faults, f"role: {pool.role} exchanges blocks: arguments: [{EXCHANGE}, 'HOST:0']")
    return replace(pool, engine=replace(pool.engine, arguments=(*pool.engine.arguments, "--role", pool.role)))


def pool_names(root: Fields) -> frozenset[str]:
    """Return the names of pools: providers that need no endpoints of their own."""
    section = root.node("fleet")
    pools = section.entries.get("pools") if isinstance(section, Section) else None
    return frozenset(pools.entries) if isinstance(pools, Section) else frozenset()


def fleet_reader(providers: Mapping[str, ProviderSettings], models: Mapping[str, ModelSpec]) -> Read[Fleet]:
    """Make a reader of the section, by the providers and models that the file has."""

    def read(node: Node, faults: Faults) -> Fleet | None:
        fields = Fields(node, node.path, faults)
        right = "what announcements of replicas are signed with: [${TOLLGATE_FLEET_SECRET}]"
        known: tuple[str, ...] = fields.need("secrets", secrets(1, strong_secret), (), right)
        nowhere: tuple[IPv4Network | IPv6Network, ...] = ()
        networks = fields.get("networks", list_of(network, what="ranges", least=1), nowhere)
        none: dict[str, Pool] = {}
        right = "the providers whose replicas announce themselves: {own: {}}"
        pools = fields.need("pools", read_pools, none, right)
        fields.close()
        sent = {key for provider in providers.values() for key in provider.api_keys}
        if not sent.isdisjoint(known):
            why = "also an api_key of a provider, which is sent to its endpoints: who hears it could announce addresses"
            complain(fields.node("secrets") or node, faults, why)
        return Fleet(secrets=known, networks=networks, pools=pools)

    def read_pools(node: Node, faults: Faults) -> dict[str, Pool] | None:
        section = Fields(node, node.path, faults).section
        pools: dict[str, Pool] = {}
        everyone = providers.values()
        for name, each in (section.entries if section is not None else {}).items():
            if (pool := _read_pool(each, faults)) is None:
                continue
            provider = providers.get(name)
            if provider is None:
                complain(each, faults, f"a pool has the name of its provider; {meant(name, providers)}")
            elif not provider.self_hosted:
                complain(each, faults, f"{name} is not our own engine: a pool's provider says self_hosted: true")
            elif len(served := {one.partition("@")[0] for one in _asked_of(name, models)}) > 1:
                each_one = ", ".join(sorted(served))
                complain(each, faults, f"a replica serves one model, and {name} has {each_one}: a provider for each")
            elif pool.role == "prefill" and served:
                complain(each, faults, f"its replicas compute prompts alone, and models name {name} as their provider")
            elif pool.role == "prefill" and not any(one.prefill and one.prefill.provider == name for one in everyone):
                complain(each, faults, f"nothing is asked of it: another provider has prefill: {{provider: {name}}}")
            pools[name] = pool
        return pools

    return read


def _asked_of(provider: str, models: Mapping[str, ModelSpec]) -> set[str]:
    everywhere = (one for model in models.values() for one in model.everywhere)
    return {one.upstream_model for one in everywhere if one.provider == provider}
