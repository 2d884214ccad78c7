# What a price library may say of a model, and the longest answers of models that it does not say.

from __future__ import annotations

import re

from msgspec import Struct

from billing.core.prices import Price
from gateway.model_facts.claude_models import rules_of


class ListedModel(Struct, frozen=True, kw_only=True):
    """A model as the library lists it."""

    price: Price
    context: int | None  # tokens
    has_output: bool  # whether the price says what answers cost; vectors have no such price


class NoPrice(Struct, frozen=True):
    """The library cannot say what the model costs."""

    why: str  # "the price library …"


# Tokens, thinking included, as the makers' pages on models have it (November 2026); the first that matches.
KNOWN = (
    (re.compile(r"\bgpt-5(?!.*-chat)"), 128_000),
    (re.compile(r"\bgpt-4\.1"), 32_768),
    (re.compile(r"\bo1-(?:mini|preview)"), 32_768),
    (re.compile(r"\bo[134](?:-|$)"), 100_000),
    (re.compile(r"\bgemini-(?:2\.5|[3-9])"), 65_536),
    (re.compile(r"\bgemini-[12]"), 8_192),
)


def longest_output(upstream_model: str) -> int | None:
    """Return the most tokens that an answer of the model can have, or ``None`` for a model that is not known."""
    known = next((most for pattern, most in KNOWN if pattern.search(upstream_model.lower())), None)
    return known or rules_of(upstream_model).max_output
