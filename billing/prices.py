# What a model's tokens cost: dollars per million, whole nano-dollars per million inside.

from __future__ import annotations

from msgspec import Struct

from billing.money import NanoDollars
from protocol.usage import Usage

MILLION = 1_000_000


class Price(Struct, frozen=True, kw_only=True):
    """Nano-dollars per million tokens of each kind. Kinds without a price of their own cost what ``input`` costs."""

    input: NanoDollars
    output: NanoDollars
    cached_input: NanoDollars | None = None
    cache_write: NanoDollars | None = None
    batch_discount: float = 1.0  # the factor on everything in tier batch


def cost_of(usage: Usage, price: Price, *, batch: bool = False) -> NanoDollars:
    """Return what ``usage`` costs at ``price``, rounded once, up, to a whole nano-dollar."""
    cached = price.input if price.cached_input is None else price.cached_input
    written = price.input if price.cache_write is None else price.cache_write
    plain = usage.input_tokens - usage.cached_input_tokens - usage.cache_write_tokens
    per_million = (
        plain * price.input
        + usage.cached_input_tokens * cached
        + usage.cache_write_tokens * written
        + usage.output_tokens * price.output
    )
    if batch and price.batch_discount != 1.0:
        per_million = per_million * round(price.batch_discount * MILLION) // MILLION
    return NanoDollars(-(-per_million // MILLION))
