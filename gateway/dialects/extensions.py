# Fields that clients of other gateways send beyond an API's own, and that are understood here. Those that cannot be
# honoured are refused once the route is known (gateway/inference/route_chooser.py); all others are left out and told.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from gateway.dialects.checks import require
from protocol.errors import BadRequest, invalid_value
from router.catalog.routing_options import ProviderPreference

MOST_SPARES = 8

# What asks for nothing that does not happen anyway.
HARMLESS: Mapping[str, tuple[object, ...]] = {
    "drop_params": (True, None),
    "transforms": ([], None),
    "plugins": ([], None),
    "guardrails": ([], None),
    "mock_response": (None,),
    "mock_tool_calls": (None,),
    "api_key": (None,),
    "api_base": (None,),
    "base_url": (None,),
    "custom_llm_provider": (None,),
    "route": ("fallback", None),
    "usage": ({"include": True}, None),
    "include_reasoning": (True, None),
    "provider.require_parameters": (False, None),
    "provider.data_collection": ("allow", None),
    "provider.zdr": (False, None),
    "provider.max_price": ({}, None),
    "provider.quantizations": ([], None),
    "provider.sort": (None,),
}


class Extensions(Struct, frozen=True, kw_only=True):
    """What a caller asks by such fields. ``understood``: their names, which are not told as left out."""

    spares: tuple[str, ...] = ()
    providers: ProviderPreference | None = None
    understood: frozenset[str] = frozenset()


NONE = Extensions()
_KNOWN = frozenset({"models", "fallbacks", "provider", "cache", "caching"} | HARMLESS.keys())


def read_extensions(extra: dict[str, Any]) -> Extensions:
    """Return what the fields unknown to an API ask for here. Parts of ``provider`` that are not understood join them by
    names such as ``provider.sort``, and LiteLLM's ``cache`` becomes ours. Raises BadRequest."""
    if _KNOWN.isdisjoint(extra):
        return NONE
    if isinstance(extra.get("cache"), dict) or "caching" in extra:
        _translate_cache(extra)
    providers = _preference(extra) if extra.get("provider") is not None else None
    understood = {name for name, fine in HARMLESS.items() if name in extra and extra[name] in fine}
    spares = [*_names(extra, "models"), *_names(extra, "fallbacks")]
    require(len(spares) <= MOST_SPARES, "models", f"'models' may name {MOST_SPARES} models at the most.")
    understood |= {"models", "fallbacks", "provider"} & extra.keys()
    return Extensions(spares=tuple(dict.fromkeys(spares)), providers=providers, understood=frozenset(understood))


def _names(extra: Mapping[str, Any], field: str) -> list[str]:
    """Return the models of a list, each a name or LiteLLM's ``{"model": name}``."""
    said = extra.get(field)
    if said is None:
        return []
    if not isinstance(said, list):
        raise invalid_value(field, "must be a list of models, tried in order after 'model'")
    found = [one["model"] if isinstance(one, dict) and one.keys() == {"model"} else one for one in said]
    if not all(isinstance(name, str) and name for name in found):
        raise invalid_value(field, "must be a list of models by their names, such as those of GET /v1/models")
    return found


def _preference(extra: dict[str, Any]) -> ProviderPreference:
    """Return OpenRouter's ``provider``, by the names of providers here."""
    said = extra["provider"]
    if not isinstance(said, dict):
        raise invalid_value("provider", 'must be an object, such as {"order": ["openai"], "allow_fallbacks": false}')
    allow = said.get("allow_fallbacks")
    if not (allow is None or isinstance(allow, bool)):
        raise invalid_value("provider.allow_fallbacks", "must be true or false")
    only = _providers(said, "only")
    for name, value in said.items():
        if name not in ("only", "ignore", "order", "allow_fallbacks"):
            extra[f"provider.{name}"] = value
    return ProviderPreference(
        only=None if only is None else frozenset(only),
        ignore=frozenset(_providers(said, "ignore") or ()),
        order=_providers(said, "order") or (),
        allow_fallbacks=allow is not False,
    )


def _providers(said: Mapping[str, Any], field: str) -> tuple[str, ...] | None:
    names = said.get(field)
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise invalid_value(f"provider.{field}", "must be a list of providers by their names")
    return tuple(name.lower() for name in names)


def _translate_cache(extra: dict[str, Any]) -> None:
    """Put ``on`` or ``off`` in the place of LiteLLM's ``cache`` and ``caching``."""
    said = extra.pop("cache", None)
    wish = extra.pop("caching", None)
    if not (wish is None or isinstance(wish, bool)):
        raise invalid_value("caching", "must be true or false")
    use = None if wish is None else "on" if wish else "off"
    if isinstance(said, dict):
        unknown = [name for name in said if name not in ("no-cache", "no-store", "use-cache")]
        if unknown:
            words = f"'cache.{unknown[0][:40]}' is not supported by this gateway. Send 'cache': 'on', 'all' or 'off'."
            raise BadRequest(words, param="cache", code="unsupported_parameter")
        if said.get("no-cache") or said.get("no-store"):
            use = "off"
        elif said.get("use-cache"):
            use = "on"
    elif said is not None:
        use = said
    if use is not None:
        extra["cache"] = use
