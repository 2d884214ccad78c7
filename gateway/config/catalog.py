# The part of tollgate.yaml that the router chooses from: providers, models and their prices, and the names that stand
# for models.

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar, get_args
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace

from gateway.config.fields import Faults, Fields, Read, complain, shown
from gateway.config.models import name_of, read_model
from gateway.config.names import read_alias, read_fallbacks, read_route
from gateway.config.readers import (
    duration,
    integer,
    list_of,
    number,
    one_of,
    secret,
    secrets,
    struct_of,
    switch,
    text,
    url,
)
from gateway.config.tree import Fault, Node, Section
from gateway.core.settings import BreakerPolicy, Format, LeftOut, OAuthClient, ProviderSettings, Retries, Timeouts
from router.catalog.catalog import AutoRoute
from router.catalog.targets import Endpoint, ModelSpec

T = TypeVar("T")

REPLICA_SILENT = 5.0  # seconds
_OAUTH = struct_of(
    OAuthClient,
    {
        "token_url": url(("https", "http"), "https://login.microsoftonline.com/TENANT/oauth2/v2.0/token"),
        "client_id": text,
        "client_secret": secret,
        "scope": text,
    },
    needed=("token_url", "client_id", "client_secret"),
)
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

    def read_one(node: Node, out: Faults) -> ModelSpec | None:
        return read_model(node, out, providers, known)

    models = _entries(root, "models", read_one, needed="at least one model to offer")
    names = _keys(root, "models")
    aliases = _entries(root, "aliases", lambda node, out: read_alias(node, out, names))
    lead_to = {**aliases, **{name: name for name in names}}
    return Catalogue(
        providers=providers,
        models=models,
        auto=_entries(root, "routes", lambda node, out: read_route(node, out, lead_to, models)),
        fallbacks=read_fallbacks(root, lead_to, models),
        aliases=aliases,
    )


def leave_out(whole: Catalogue) -> tuple[Catalogue, tuple[LeftOut, ...]]:
    """Return the catalogue without optional providers that have no key, and what went with each: a model, and what
    names it. It happens after everything was read and checked, so that a typo is a fault in either case."""
    away = {name for name, provider in whole.providers.items() if provider.optional and not provider.api_keys}
    if not away:
        return whole, ()
    models = {name: model for name, model in whole.models.items() if model.provider not in away}
    routes = {name: short for name, route in whole.auto.items() if (short := _shortened(route, models)) is not None}
    spares = {
        name: tuple(other for other in others if other in models)
        for name, others in whole.fallbacks.items()
        if name in models
    }
    kept = Catalogue(
        providers={name: provider for name, provider in whole.providers.items() if name not in away},
        models=models,
        auto=routes,
        fallbacks={name: others for name, others in spares.items() if others},
        aliases={name: model for name, model in whole.aliases.items() if model in models},
    )
    return kept, tuple(_what_goes(whole, kept, provider) for provider in whole.providers if provider in away)


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


def _provider(node: Node, faults: Faults) -> ProviderSettings:
    fields = Fields(node, node.path, faults)
    formats = get_args(Format)
    wire: Format = fields.need("format", one_of(*formats), "openai", f"{' or '.join(formats)}: how it wants requests")
    read_url = _base_url(wire, is_azure=fields.has("api_version"))
    read_endpoint = struct_of(Endpoint, {"region": text, "base_url": read_url}, needed=("region", "base_url"))
    read_endpoints = list_of(read_endpoint, what="endpoints", least=1)
    endpoints: tuple[Endpoint, ...] = fields.need(
        "endpoints", read_endpoints, (), "where it answers: [{region: us, base_url: https://…}]"
    )
    if len(set(endpoints)) < len(endpoints):
        complain(fields.node("endpoints") or node, faults, "the same endpoint twice")
    nothing: tuple[str, ...] = ()
    self_hosted = fields.get("self_hosted", switch, False)
    optional = fields.get("optional", switch, False)
    api_version = fields.find("api_version", text)
    if api_version is not None and wire != "openai":
        complain(fields.node("api_version") or node, faults, "only for Azure OpenAI, whose format is openai")
    ways = [name for name in ("api_keys", "oauth", "token_file") if fields.has(name)]
    if len(ways) > 1:
        complain(
            fields.node(ways[-1]) or node, faults, f"a provider is asked in one way: keep one of {', '.join(ways)}"
        )
    if optional and not fields.has("api_keys"):
        complain(fields.node("optional") or node, faults, "left out while no key is set: needs api_keys: [${NAME:-}]")
    # A replica sends a keep-alive every second; where another can go on, a silent one is soon abandoned.
    usual = Timeouts(between_tokens=REPLICA_SILENT) if self_hosted and len(endpoints) > 1 else Timeouts()
    read_timeouts = struct_of(partial(replace, usual), _TIMEOUTS)
    provider = ProviderSettings(
        name=name_of(node),
        format=wire,
        api_keys=fields.get("api_keys", secrets(0), nothing),
        oauth=fields.find("oauth", _OAUTH),
        token_file=fields.find("token_file", _token_file),
        api_version=api_version,
        endpoints=endpoints,
        self_hosted=self_hosted,
        optional=optional,
        concurrency=fields.find("concurrency", integer(1)),
        timeouts=fields.get("timeouts", read_timeouts, usual),
        retries=fields.get("retries", struct_of(Retries, _RETRIES), Retries()),
        breaker=fields.get("breaker", struct_of(BreakerPolicy, _BREAKER), BreakerPolicy()),
        allow_fields=frozenset(fields.get("allow_fields", list_of(text, what="field names"), nothing)),
    )
    fields.close()
    return provider


def _token_file(node: Node, faults: Faults) -> Path | None:
    name = text(node, faults)
    if name is not None and not Path(name).is_file():
        return complain(node, faults, f"there is no file {shown(node)}; a token must lie there, and be renewed there")
    return None if name is None else Path(name)


def _base_url(wire: str, *, is_azure: bool) -> Read[str]:
    """Make a reader of a base URL as ``wire`` has it: with the version for OpenAI and Gemini, without for Anthropic and
    Azure."""
    read_url = url(("http", "https"), "https://api.openai.com/v1")

    def read(node: Node, faults: Faults) -> str | None:
        value = read_url(node, faults)
        if value is None:
            return None
        parts = urlsplit(value)
        path = parts.path.rstrip("/")
        if parts.username or parts.password or parts.query or parts.fragment or not parts.hostname:
            return complain(node, faults, "a base URL is scheme, host, port and path alone; keys belong in api_keys")
        if is_azure:
            if path.endswith(("/openai", "/v1")) or "/deployments" in path:
                right = "the base URL beside an api_version ends before /openai; without one, it ends in /openai/v1"
                return complain(node, faults, right)
            return value.rstrip("/")
        if wire == "openai" and not path:
            return complain(node, faults, "the base URL of the OpenAI format ends in its version: add /v1")
        if wire == "gemini" and not path:
            return complain(node, faults, "the base URL of the Gemini format ends in its version: add /v1beta")
        if wire == "anthropic" and path.endswith("/v1"):
            return complain(node, faults, "the base URL of the Anthropic format ends before the version: drop /v1")
        return value.rstrip("/")

    return read


def _shortened(route: AutoRoute, models: Mapping[str, object]) -> AutoRoute | None:
    """Return a route over the models that are left; where one side is empty, the other answers for it."""
    left, shadow = route.among(models.keys()), route.shadow
    if shadow is not None and shadow.judge not in models:
        shadow = replace(shadow, judge=None)
    if not (left.small or left.large):
        return None
    return replace(left, small=left.small or left.large, large=left.large or left.small, shadow=shadow)


def _what_goes(whole: Catalogue, kept: Catalogue, provider: str) -> LeftOut:
    models = tuple(name for name, model in whole.models.items() if model.provider == provider)
    routes = tuple(
        name
        for name, route in whole.auto.items()
        if route != kept.auto.get(name) and not {*models}.isdisjoint((*route.small, *route.large))
    )
    aliases = tuple(name for name, model in whole.aliases.items() if model in models)
    return LeftOut(provider, models, aliases, routes)
