# What the inference routes share: a request's body and headers become a Call.

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from billing.core.money import to_nano
from gateway.calls.call import Call
from gateway.core.errors import Forbidden
from gateway.core.principals import Caller
from gateway.http.exchange import AnyRequest, caller_of, read_body, services_of
from gateway.inference.services import Services
from protocol.decoding import decode_with_extra
from protocol.errors import BadRequest, UnsupportedParameter, invalid_value
from protocol.messages import MessagesRequest
from router import Wish
from router.catalog.targets import Tier

T = TypeVar("T", bound=Struct)

# Fields that change what an answer costs in ways no price of ours covers. Refused, never dropped in silence.
UNPRICED = frozenset(
    {"service_tier", "web_search_options", "prediction", "audio", "modalities", "functions"}
    | {"mcp_servers", "container", "speed", "inference_geo"}  # Anthropic's
)
HARMLESS: Mapping[str, tuple[object, ...]] = {
    "service_tier": ("auto", "default", "standard_only", None),
    "modalities": (["text"], None),
    "speed": ("standard", None),
}
INSTEAD: Mapping[str, str] = {"functions": "Send 'tools'."}
LONGEST_TAG = 512  # characters
IDEMPOTENCY_KEY = re.compile(r"[\x20-\x7e]{1,255}")
OPTIONS = ("tier", "team_id", "priority", "quality", "max_cost_usd")


class Options(Struct, frozen=True, kw_only=True):
    """What a caller may say beyond OpenAI's fields, in headers or body."""

    tier: Literal["interactive", "batch"] = "interactive"
    team_id: str | None = None
    priority: Literal["low", "normal", "high"] = "normal"
    quality: float | None = None
    max_cost_usd: float | None = None


async def read_call(request: AnyRequest, kind: type[T], check: Callable[[T], None], endpoint: str) -> Call:
    """Decode a request's body as ``kind``, ``check`` it, and return the call that it makes. Raises BadRequest and its
    kin."""

    def read(body: bytes) -> tuple[T, dict[str, Any]]:
        asked, extra = decode_with_extra(body, kind)
        note_model(request, asked)
        check(asked)
        return asked, extra

    (asked, extra), size = await read_body(request, read)
    return call_of(request, asked, extra, endpoint, size)


def note_model(request: AnyRequest, asked: Any) -> None:
    """Note the model that a decoded body asks for: for the log, should the call be refused from here on."""
    request.scope["state"]["model_asked"] = asked.model


def call_of(
    request: AnyRequest,
    asked: Any,
    extra: dict[str, Any],
    endpoint: str,
    size: int,
    native: MessagesRequest | None = None,
) -> Call:
    """Return the call that a decoded request of ``size`` bytes makes; ``extra`` are its fields unknown to us.

    Raises BadRequest.
    """
    services = services_of(request)
    caller = caller_of(request)
    options = read_options(request.headers, extra)
    if options.team_id is not None and options.team_id != caller.team.id:
        raise Forbidden("The request names another team than the key's own.", param="team_id")
    refuse_unpriced(extra)
    check_tags(asked)
    return Call(
        request_id=request.scope["state"]["request_id"],
        caller=caller,
        endpoint=endpoint,
        request=asked,
        native=native,
        wish=wish_of(services, caller, options, Tier(options.tier)),
        priority=options.priority,
        extra=extra,
        size=size,
        client_request_id=request.scope["state"].get("client_request_id"),
        traceparent=None if services.tracer is None else request.headers.get("traceparent"),
        idempotency_key=read_idempotency_key(request.headers),
        created_at=services.clock.now(),
        started=services.clock.monotonic(),
    )


def wish_of(services: Services, caller: Caller, options: Options, tier: Tier) -> Wish:
    """Return what a caller asks beyond the body, and what its team allows."""
    return Wish(
        tier=tier,
        allowed_models=caller.team.allowed_models,
        allow_smaller=caller.team.allow_smaller,
        quality=options.quality,
        recalibrated=services.recalibrations.of(caller.team.id),
        max_cost_nanousd=None if options.max_cost_usd is None else to_nano(options.max_cost_usd),
    )


def read_options(headers: Mapping[str, str], extra: dict[str, Any]) -> Options:
    """Return the caller's options and take them out of ``extra``. Header and body must not disagree."""
    found: dict[str, Any] = {}
    for name in OPTIONS:
        header = "x-" + name.replace("_", "-")
        said = [value for key in (name, header) if key in extra and (value := extra.pop(key)) is not None]
        if (value := headers.get(header)) is not None:
            said.append(value)
        if not said:
            continue
        if any(str(other) != str(said[0]) and not _same_number(other, said[0]) for other in said[1:]):
            words = f"The header {header} and the body's '{name}' disagree. Send one of them."
            raise BadRequest(words, param=name, code="invalid_value")
        found[name] = said[0]
    if not found:
        return DEFAULT_OPTIONS
    for name in ("quality", "max_cost_usd"):
        if name in found:
            found[name] = _number(name, found[name], most=1.0 if name == "quality" else math.inf)
    try:
        return msgspec.convert(found, Options)
    except msgspec.ValidationError as exc:
        raise _bad_option(exc, found) from exc


DEFAULT_OPTIONS = Options()


def read_idempotency_key(headers: Mapping[str, str]) -> str | None:
    """Return the key under which this call is answered once, if it has one. Raises BadRequest."""
    key = headers.get("idempotency-key")
    if key is not None and IDEMPOTENCY_KEY.fullmatch(key) is None:
        raise BadRequest(
            "An Idempotency-Key is 1 to 255 printable ASCII characters.", param="Idempotency-Key", code="invalid_value"
        )
    return key


def refuse_unpriced(extra: Mapping[str, Any]) -> None:
    """Refuse fields that would change the price of the answer. Raises UnsupportedParameter."""
    for name in UNPRICED & extra.keys():
        if extra[name] not in HARMLESS.get(name, (None,)):
            harmless = [msgspec.json.encode(value).decode() for value in HARMLESS.get(name, ()) if value is not None]
            right = (
                f"Leave it out, or send {' or '.join(harmless)}." if harmless else INSTEAD.get(name, "Leave it out.")
            )
            raise UnsupportedParameter(f"'{name}' is not supported by this gateway. {right}", param=name)


def check_tags(asked: Any) -> None:
    """Refuse tags longer than OpenAI takes: they are kept in the journal and in the ledger. Raises BadRequest."""
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        value = getattr(asked, name, None)
        require(value is None or len(value) <= LONGEST_TAG, name, f"'{name}' is longer than {LONGEST_TAG} characters.")
    pairs = getattr(asked, "metadata", None) or {}
    require(len(pairs) <= 16, "metadata", "'metadata' may hold at most 16 pairs.")
    is_short = all(len(key) <= 64 and len(value) <= LONGEST_TAG for key, value in pairs.items())
    require(is_short, "metadata", f"A key of 'metadata' has at most 64 characters, a value at most {LONGEST_TAG}.")


def require(is_fine: bool, param: str, message: str) -> None:
    """Raise BadRequest about ``param`` unless it is fine."""
    if not is_fine:
        raise BadRequest(message, param=param, code="invalid_value")


def require_between(value: float | None, low: float, high: float, param: str) -> None:
    """Raise BadRequest unless ``value`` is unsaid or from ``low`` to ``high``."""
    if value is not None and not low <= value <= high:
        raise invalid_value(param, f"must be from {low:.12g} to {high:.12g}, not {str(value)[:24]}")


def _number(name: str, value: Any, most: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not 0 <= number <= most or math.isinf(number):
        span = "from 0 to 1" if most == 1 else "0 or more"
        raise invalid_value(name, f"must be a number {span}")
    return number


def _same_number(one: Any, other: Any) -> bool:
    try:
        return float(one) == float(other)
    except (TypeError, ValueError, OverflowError):
        return False


def _bad_option(exc: msgspec.ValidationError, found: Mapping[str, Any]) -> BadRequest:
    name = next(name for name in found if f"$.{name}`" in str(exc))
    right = {"tier": "'interactive' or 'batch'", "priority": "'low', 'normal' or 'high'"}.get(name, "a text")
    return invalid_value(name, f"must be {right}, not {str(found[name])[:40]!r}")
