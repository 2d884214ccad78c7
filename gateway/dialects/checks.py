# What every dialect checks alike: fields that no price covers, tags, and the refusal of what is not fine.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.core.settings import PRICED_TIERS
from protocol.errors import BadRequest, invalid_value, not_supported

# Fields that change what an answer costs in ways no price of ours covers. Refused, never dropped in silence.
UNPRICED = frozenset(
    {"service_tier", "web_search_options", "prediction", "audio", "modalities", "functions"}
    | {"mcp_servers", "container", "speed", "inference_geo"}  # Anthropic's
)
HARMLESS: Mapping[str, tuple[object, ...]] = {
    "service_tier": ("auto", "default", "standard_only", *PRICED_TIERS, None),
    "modalities": (["text"], None),
    "speed": ("standard", None),
}
INSTEAD: Mapping[str, str] = {"functions": "Send 'tools'."}
LONGEST_TAG = 512  # characters


def refuse_unpriced(extra: Mapping[str, Any]) -> None:
    """Refuse fields that would change the price of the answer. Raises UnsupportedParameter."""
    for name in UNPRICED & extra.keys():
        if extra[name] not in HARMLESS.get(name, (None,)):
            harmless = [msgspec.json.encode(value).decode() for value in HARMLESS.get(name, ()) if value is not None]
            right = (
                f"Leave it out, or send {' or '.join(harmless)}." if harmless else INSTEAD.get(name, "Leave it out.")
            )
            raise not_supported(name, right)


def check_tags(asked: Any) -> None:
    """Refuse tags longer than OpenAI takes: they are kept in the journal and in the ledger. Raises BadRequest."""
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        if (value := getattr(asked, name, None)) is not None:
            require(len(value) <= LONGEST_TAG, name, f"'{name}' is longer than {LONGEST_TAG} characters.")
    if not (pairs := getattr(asked, "metadata", None)):
        return
    require(len(pairs) <= 16, "metadata", "'metadata' may hold at most 16 pairs.")
    is_short = all(len(key) <= 64 and len(value) <= LONGEST_TAG for key, value in pairs.items())
    require(is_short, "metadata", f"A key of 'metadata' has at most 64 characters, a value at most {LONGEST_TAG}.")


def require(is_fine: bool, param: str, message: str) -> None:
    """Raise BadRequest about ``param`` unless it is fine; ``message`` has no word of the request's."""
    if not is_fine:
        raise BadRequest(message, param=param, code="invalid_value").keeping(message)


def require_short(text: str | None, most: int, param: str, right: str = "") -> None:
    """Raise BadRequest for a text of more than ``most`` characters; ``right`` says what to do."""
    require(len(text or "") <= most, param, f"'{param}' may have at most {most} characters.{right}")


def require_between(value: float | None, low: float, high: float, param: str) -> None:
    """Raise BadRequest unless ``value`` is unsaid or from ``low`` to ``high``."""
    if value is not None and not low <= value <= high:
        right = f"must be from {low:.12g} to {high:.12g}"
        raise invalid_value(param, f"{right}, not {str(value)[:24]}").keeping(f"It {right}.")
