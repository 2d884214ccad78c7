# The part of tollgate.yaml that the router chooses from: providers, models and their prices, and the names that stand
# for a model (routes, fallbacks, aliases), which must all lead to one that exists.

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeVar
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace

from billing.money import NanoDollars
from billing.prices import Price
from gateway.config_readers import (
    Faults,
    Fields,
    Read,
    complain,
    dollars,
    duration,
    integer,
    list_of,
    meant,
    number,
    one_of,
    secrets,
    shown,
    struct_of,
    switch,
    text,
    url,
)
from gateway.config_yaml import Fault, Node, Section, join
from gateway.price_library import ListedModel, listed_model
from gateway.settings import BreakerPolicy, ProviderSettings, Retries, Timeouts
from router.catalog import AutoRoute
from router.targets import Ability, Endpoint, ModelSpec, Tier

T = TypeVar("T")
Format = Literal["openai", "anthropic"]

DEFAULT_CONTEXT = 32_768  # tokens, where neither the file nor the price library knows
DEFAULT_MAX_OUTPUT = 16_384
OWN_ABILITIES = (Ability.CHAT, Ability.COMPLETIONS)
OUTSIDE_ABILITIES = (Ability.CHAT, Ability.TOOLS, Ability.JSON)

_TIMEOUTS = {"connect": duration, "first_token": duration, "between_tokens": duration, "total": duration}
_RETRIES = {"attempts": integer(1, 10), "budget": number(0, 10)}
_BREAKER = {
    "window": duration,
    "min_requests": integer(1),
    "failure_ratio": number(0, 1, above=True),
    "open_for": duration,
    "probes": integer(1),
}


class Catalogue(Struct, frozen=True, kw_only=True):
    """What the file offers, references resolved: every model named below is one of ``models``."""

    providers: dict[str, ProviderSettings]
    models: dict[str, ModelSpec]
    auto: dict[str, AutoRoute]
    fallbacks: dict[str, tuple[str, ...]]
    aliases: dict[str, str]


def read_catalogue(root: Fields, faults: Faults) -> Catalogue:
    """Read everything that the router chooses from; faulty entries are noted and stand in half-read."""
    providers = _entries(root, "providers", _provider, needed="at least one provider, such as openai")
    known = _keys(root, "providers")

    def read_model(node: Node, out: Faults) -> ModelSpec | None:
        return _model(node, out, providers, known)

    models = _entries(root, "models", read_model, needed="at least one model to offer")
    names = _keys(root, "models")
    aliases = _entries(root, "aliases", lambda node, out: _alias(node, out, names))
    lead_to = {**aliases, **{name: name for name in names}}
    return Catalogue(
        providers=providers,
        models=models,
        auto=_entries(root, "routes", lambda node, out: _route(node, out, lead_to)),
        fallbacks=_fallbacks(root, lead_to, faults),
        aliases=aliases,
    )


def _entries(root: Fields, key: str, read: Read[T], needed: str = "") -> dict[str, T]:
    """Return a section whose keys are names of the user's choice."""
    if needed and not root.has(key):
        root.faults.append(Fault(root.line, key, f"missing; {needed}"))
    section = Fields(root.node(key), key, root.faults).section
    if section is None:
        return {}
    if needed and not section.entries:
        complain(section, root.faults, f"empty; {needed}")
    found: dict[str, T] = {}
    for name, node in section.entries.items():
        if not name.strip() or any(character.isspace() or not character.isprintable() for character in name):
            complain(node, root.faults, "a name is one word, without spaces")
        if (value := read(node, root.faults)) is not None:
            found[name] = value
    return found


def _keys(root: Fields, key: str) -> tuple[str, ...]:
    node = root.node(key)
    return tuple(node.entries) if isinstance(node, Section) else ()


def _name_of(node: Node) -> str:
    return node.path.partition(".")[2]


def _provider(node: Node, faults: Faults) -> ProviderSettings:
    fields = Fields(node, node.path, faults)
    wire: Format = fields.need(
        "format", one_of("openai", "anthropic"), "openai", "openai or anthropic: how it wants requests"
    )
    read_url = _base_url(wire)
    read_endpoint = struct_of(Endpoint, {"region": text, "base_url": read_url}, needed=("region", "base_url"))
    read_endpoints = list_of(read_endpoint, what="endpoints", least=1)
    endpoints: tuple[Endpoint, ...] = fields.need(
        "endpoints", read_endpoints, (), "where it answers: [{region: us, base_url: https://…}]"
    )
    if len(set(endpoints)) < len(endpoints):
        complain(fields.node("endpoints") or node, faults, "the same endpoint twice")
    nothing: tuple[str, ...] = ()
    provider = ProviderSettings(
        name=_name_of(node),
        format=wire,
        api_keys=fields.get("api_keys", secrets(0), nothing),
        endpoints=endpoints,
        self_hosted=fields.get("self_hosted", switch, False),
        timeouts=fields.get("timeouts", struct_of(Timeouts, _TIMEOUTS), Timeouts()),
        retries=fields.get("retries", struct_of(Retries, _RETRIES), Retries()),
        breaker=fields.get("breaker", struct_of(BreakerPolicy, _BREAKER), BreakerPolicy()),
        allow_fields=frozenset(fields.get("allow_fields", list_of(text, what="field names"), nothing)),
    )
    fields.close()
    return provider


def _base_url(wire: str) -> Read[str]:
    """Make a reader of a base URL as ``wire`` has it: with the version for OpenAI, without for Anthropic."""
    read_url = url(("http", "https"), "https://api.openai.com/v1")

    def read(node: Node, faults: Faults) -> str | None:
        value = read_url(node, faults)
        if value is None:
            return None
        parts = urlsplit(value)
        path = parts.path.rstrip("/")
        if parts.username or parts.password or parts.query or parts.fragment or not parts.hostname:
            return complain(node, faults, "a base URL is scheme, host, port and path alone; keys belong in api_keys")
        if wire == "openai" and not path:
            return complain(node, faults, "the base URL of the OpenAI format ends in its version: add /v1")
        if wire == "anthropic" and path.endswith("/v1"):
            return complain(node, faults, "the base URL of the Anthropic format ends before the version: drop /v1")
        return value.rstrip("/")

    return read


def _model(
    node: Node, faults: Faults, providers: dict[str, ProviderSettings], known: tuple[str, ...]
) -> ModelSpec | None:
    fields = Fields(node, node.path, faults)
    provider_name = fields.need("provider", _name_in(known, "provider"), "", "the name of one of `providers`")
    provider = providers.get(provider_name)
    own = provider is not None and provider.self_hosted
    upstream = fields.get("upstream_model", text, _name_of(node))
    listed = _listed(upstream, provider_name, provider)
    usual = OWN_ABILITIES if own else OUTSIDE_ABILITIES
    abilities = fields.get("abilities", list_of(one_of(*Ability), what="abilities", least=1), usual)
    tiers = fields.get("tiers", list_of(one_of(*Tier), what="tiers", least=1), tuple(Tier))
    context = fields.get("context", integer(1), _usual_context(listed, fields.has("price")))
    max_output = fields.get("max_output", integer(1), min(context, DEFAULT_MAX_OUTPUT))
    if max_output > context:
        complain(fields.node("max_output") or node, faults, f"more than the {context} tokens of `context`")
    if fields.has("gpu_hour") and provider is not None and not own:
        complain(fields.node("gpu_hour") or node, faults, f"only for our own engine; {provider_name} is no such thing")
    spec = ModelSpec(
        name=_name_of(node),
        provider=provider_name,
        upstream_model=upstream,
        price=_price(fields, upstream, set(abilities) == {Ability.EMBEDDINGS}, context, listed),
        context=context,
        max_output=max_output,
        abilities=frozenset(map(Ability, abilities)),
        tiers=frozenset(map(Tier, tiers)),
        weight=fields.get("weight", number(0, 1000, above=True), 1.0),
        gpu_hour_nanousd=fields.find("gpu_hour", dollars),
        note=fields.find("note", text),
    )
    fields.close()
    return spec


def _listed(upstream: str, provider_name: str, provider: ProviderSettings | None) -> ListedModel | None:
    if provider is not None and provider.self_hosted:
        return None
    endpoints = provider.endpoints if provider is not None else ()
    return listed_model(upstream, provider=provider_name, base_url=endpoints[0].base_url if endpoints else "")


def _usual_context(listed: ListedModel | None, is_priced: bool) -> int:
    if listed is None or listed.context is None:
        return DEFAULT_CONTEXT
    return listed.context if is_priced or listed.true_up_to is None else min(listed.context, listed.true_up_to)


def _price(fields: Fields, upstream: str, only_embeds: bool, context: int, listed: ListedModel | None) -> Price:
    """Return the file's price, else the library's; never a zero that nobody wrote."""
    discount = fields.get("batch_discount", number(0, 1, above=True), 1.0)
    node = fields.node("price")
    if node is not None:
        kinds = dict.fromkeys(("input", "output", "cached_input", "cache_write"), dollars)
        needed = ("input",) if only_embeds else ("input", "output")
        written = struct_of(_WrittenPrice, kinds, needed=needed)(node, fields.faults) or _WrittenPrice()
        return Price(
            input=written.input,
            output=written.output,
            cached_input=written.cached_input,
            cache_write=written.cache_write,
            batch_discount=discount,
        )
    right = "{input: …, output: …} in USD per million tokens"
    if listed is None:
        if fields.section is not None:
            known = f"the price library does not know {upstream}" if upstream else "nothing else says it"
            fields.faults.append(
                Fault(fields.line, join(fields.path, "price"), f"missing, and {known}; add price: {right}")
            )
        return Price(input=NanoDollars(0), output=NanoDollars(0))
    if listed.true_up_to is not None and context > listed.true_up_to:
        step = f"{upstream} costs more beyond {listed.true_up_to} prompt tokens"
        message = f"{step}: set context: {listed.true_up_to}, or add price: {right} that covers both"
        fields.faults.append(Fault(fields.line, join(fields.path, "price"), message))
    return replace(listed.price, batch_discount=discount)


class _WrittenPrice(Struct, frozen=True, kw_only=True):
    input: NanoDollars = NanoDollars(0)
    output: NanoDollars = NanoDollars(0)
    cached_input: NanoDollars | None = None
    cache_write: NanoDollars | None = None


def _name_in(known: Iterable[str], what: str) -> Read[str]:
    """Make a reader of a name that must be one of ``known``."""

    def read(node: Node, faults: Faults) -> str | None:
        name = text(node, faults)
        if name is None or name in known:
            return name
        return complain(node, faults, f"unknown {what} {shown(node)}; {meant(name, known)}")

    return read


def _alias(node: Node, faults: Faults, models: tuple[str, ...]) -> str | None:
    if _name_of(node) in models:
        return complain(node, faults, "there is a model of this name; an alias would hide it")
    return _name_in(models, "model")(node, faults)


def _route(node: Node, faults: Faults, lead_to: dict[str, str]) -> AutoRoute | None:
    if _name_of(node) in lead_to:
        complain(node, faults, "there is a model or an alias of this name; a route needs a name of its own")
    read_models = list_of(_name_in(lead_to, "model"), what="models", least=1)
    fields = Fields(node, node.path, faults)
    route = AutoRoute(
        small=_resolved(fields.need("small", read_models, (), "models that answer simple requests"), lead_to),
        large=_resolved(fields.need("large", read_models, (), "models that answer the others"), lead_to),
        quality=fields.get("quality", number(0, 1), 0.8),
    )
    fields.close()
    return route


def _fallbacks(root: Fields, lead_to: dict[str, str], faults: Faults) -> dict[str, tuple[str, ...]]:
    read_models = list_of(_name_in(lead_to, "model"), what="models", least=1)
    found: dict[str, tuple[str, ...]] = {}
    for name, node in (
        section.entries if (section := Fields(root.node("fallbacks"), "fallbacks", faults).section) else {}
    ).items():
        if name not in lead_to:
            complain(node, faults, f"unknown model {name}; {meant(name, lead_to)}")
        models = _resolved(read_models(node, faults) or (), lead_to)
        if lead_to.get(name) in models:
            complain(node, faults, "a model cannot fall back to itself")
        found[lead_to.get(name, name)] = models
    return found


def _resolved(names: Iterable[str], lead_to: dict[str, str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(lead_to[name] for name in names))
