# What a caller may say beyond an API's own fields, in headers or body.

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct, UnsetType

from billing.core.money import to_nano
from gateway.calls.call import NO_PLACING, Placing
from gateway.core.errors import EndpointNotAllowed, Forbidden
from gateway.core.principals import Caller
from gateway.core.settings import CacheUse
from gateway.dialects.checks import check_tags, refuse_unpriced, require
from gateway.dialects.endpoint import Asked
from gateway.dialects.extensions import NONE, Extensions, read_extensions
from gateway.dialects.table import BY_NAME, REALTIME
from gateway.inference.recalibrations import Recalibrations
from protocol.errors import BadRequest, invalid_param, invalid_value
from router import RoutingOptions
from router.catalog.targets import Tier

IDEMPOTENCY_KEY = re.compile(r"[\x20-\x7e]{1,255}")
TOOLS = re.compile(r"mcp(/[A-Za-z0-9_-]{1,64}(/[\x21-\x7e]{1,256})?)?")  # of MCP servers: all, one's, or one
OPTIONS = ("tier", "team_id", "priority", "quality", "max_cost_usd", "cache")
PLACING = ("session_id", "gateway_destination_endpoint", "llm_d_slo_ttft_ms")  # as routers of other fleets name them
ENDPOINTS = re.compile(r"[\w.:\[\]-]{1,255}(,[\w.:\[\]-]{1,255}){0,15}", re.ASCII)
HEADERS = {name: "x-" + name.replace("_", "-") for name in (*OPTIONS, *PLACING)}  # their other names, in bodies too
NAMES = frozenset((*OPTIONS, *HEADERS.values()))


class Options(Struct, frozen=True, kw_only=True):
    """What a caller may say beyond OpenAI's fields, in headers or body."""

    tier: Tier = Tier.INTERACTIVE
    team_id: str | None = None
    priority: Literal["low", "normal", "high"] = "normal"
    quality: float | None = None
    max_cost_usd: float | None = None
    cache: CacheUse | None = None
    session_id: str | None = None
    gateway_destination_endpoint: str | None = None
    llm_d_slo_ttft_ms: float | None = None


def placing_of(options: Options) -> Placing:
    """Return what a caller says of where its call should go, and how soon it should begin. Raises BadRequest."""
    if options is DEFAULT_OPTIONS:
        return NO_PLACING
    named, soon = (options.gateway_destination_endpoint or "").replace(" ", ""), options.llm_d_slo_ttft_ms
    header = HEADERS["gateway_destination_endpoint"]
    words = f"'{header}' must be up to 16 of 'address:port', with commas between."
    require(not named or ENDPOINTS.fullmatch(named) is not None, header, words)
    addresses = tuple(named.split(",")) if named else ()
    return Placing(options.session_id, addresses, math.inf if soon is None else soon / 1000)


def routing_options(
    recalibrations: Recalibrations, caller: Caller, options: Options, tier: Tier, extensions: Extensions = NONE
) -> RoutingOptions:
    """Return what a caller asks beyond the body, and what its team allows."""
    return RoutingOptions(
        tier=tier,
        allowed_models=caller.team.allowed_models,
        key_models=caller.key_models,
        allow_smaller=caller.team.allow_smaller,
        quality=options.quality,
        recalibrated=recalibrations.of(caller.team.id),
        learned=recalibrations.learned(caller.team.id),
        max_cost_nanousd=None if options.max_cost_usd is None else to_nano(options.max_cost_usd),
        spares=extensions.spares,
        providers=extensions.providers,
    )


def check_endpoints(names: Collection[str] | UnsetType | None) -> None:
    """Raise BadRequest where the endpoints that a key may call have no such names."""
    for place, name in enumerate(names or ()):
        if name not in BY_NAME and name != REALTIME and TOOLS.fullmatch(name) is None:
            right = f"{', '.join(BY_NAME)}, {REALTIME}, mcp, mcp/SERVER or mcp/SERVER/TOOL"
            raise invalid_value(f"allowed_endpoints[{place}]", f"must be one of {right}")


def check_endpoint(caller: Caller, endpoint: str) -> None:
    """Raise EndpointNotAllowed for a key that may not call an endpoint (``ApiEndpoint.name``)."""
    if caller.key_endpoints is not None and endpoint not in caller.key_endpoints:
        allowed = ", ".join(sorted(caller.key_endpoints)) or "none"
        raise EndpointNotAllowed(f"This key may not call {endpoint}; it may call: {allowed}. Ask who made it for you.")


def options_of(
    asked: Asked, caller: Caller, endpoint: str, headers: Mapping[str, str], owner: str
) -> tuple[Options, Extensions]:
    """Return the options that come with a request, taken out of the fields unknown to us, and what else these ask for.

    Raises BadRequest where they, its tags or its other unknown fields are not fine, and Forbidden where they name
    another team than that of the ``owner`` of the request, a key or a batch, or where the key is for other endpoints.
    """
    check_endpoint(caller, endpoint)
    extensions = read_extensions(asked.extra) if asked.extra else NONE
    options = read_options(headers, asked.extra)
    if options.team_id is not None and options.team_id != caller.team.id:
        raise Forbidden(f"The request names another team than the {owner}'s own.", param="team_id")
    refuse_unpriced(asked.extra)
    check_tags(asked.request)
    return options, extensions


def read_options(headers: Mapping[str, str], extra: dict[str, Any]) -> Options:
    """Return the caller's options and take them out of ``extra``. Header and body must not disagree."""
    if NAMES.isdisjoint(extra) and NAMES.isdisjoint(headers):
        return DEFAULT_OPTIONS
    found: dict[str, Any] = {}
    spelled: dict[str, str] = {}  # by which of its names each was said
    for name, header in HEADERS.items():
        keys = (header,) if name in PLACING else (name, header)
        said = [(key, value) for key in keys if key in extra and (value := extra.pop(key)) is not None]
        if (value := headers.get(header)) is not None:
            said.append((header, value))
        if not said:
            continue
        spelled[name], found[name] = said[0]
        agree = all(str(other) == str(found[name]) or _same_number(other, found[name]) for _, other in said[1:])
        require(agree, name, f"The header {header} and the body's '{name}' disagree. Send one of them.")
    if not found:
        return DEFAULT_OPTIONS
    for name in ("quality", "max_cost_usd", "llm_d_slo_ttft_ms"):
        if name in found:
            param = HEADERS[name] if name in PLACING else name
            found[name] = _number(param, spelled[name], found[name], most=1.0 if name == "quality" else math.inf)
    try:
        return msgspec.convert(found, Options)
    except msgspec.ValidationError as exc:
        raise _bad_option(exc, found, spelled) from exc


DEFAULT_OPTIONS = Options()


def read_idempotency_key(headers: Mapping[str, str]) -> str | None:
    """Return the key under which this call is answered once, if it has one. Raises BadRequest."""
    key = headers.get("idempotency-key")
    is_fine = key is None or IDEMPOTENCY_KEY.fullmatch(key) is not None
    require(is_fine, "Idempotency-Key", "An Idempotency-Key is 1 to 255 printable ASCII characters.")
    return key


def _number(name: str, spelled: str, value: Any, most: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    is_fine = not isinstance(value, bool) and 0 <= number <= most and not math.isinf(number)
    require(is_fine, name, f"'{spelled}' must be a number {'from 0 to 1' if most == 1 else '0 or more'}.")
    return number


def _same_number(one: Any, other: Any) -> bool:
    try:
        return float(one) == float(other)
    except (TypeError, ValueError, OverflowError):
        return False


def _bad_option(exc: msgspec.ValidationError, found: Mapping[str, Any], spelled: Mapping[str, str]) -> BadRequest:
    name = next(name for name in found if f"$.{name}`" in str(exc))
    right = {
        "tier": "'interactive' or 'batch'",
        "priority": "'low', 'normal' or 'high'",
        "cache": "'on', 'all' or 'off'",
    }.get(name, "a text")
    words = f"'{spelled[name]}' must be {right}"
    return invalid_param(name, f"{words}, not {str(found[name])[:40]!r}.").keeping(f"{words}.")
