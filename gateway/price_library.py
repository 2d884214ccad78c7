# What the maintained price library (genai-prices, its data bundled, no network) knows of a model: what its tokens
# cost and how long its window is. A price of several steps is only taken as far as its first step is true.

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

from genai_prices.data_snapshot import get_snapshot
from genai_prices.types import ModelPrice, TieredPrices
from msgspec import Struct

from billing.money import NanoDollars, to_nano
from billing.prices import Price


class ListedModel(Struct, frozen=True, kw_only=True):
    """A model as the library lists it. Where its price rises with the prompt, the price is the first step's."""

    price: Price
    context: int | None  # tokens
    true_up_to: int | None = None  # prompt tokens beyond which the price is another


def listed_model(model: str, *, provider: str, base_url: str, at: datetime | None = None) -> ListedModel | None:
    """Return what the library says of ``model``, or ``None`` where it knows no price of it.

    The provider is recognised by its base URL, else by its name, else by the model's name alone.
    """
    snapshot = get_snapshot()
    for name, address in ((None, base_url), (provider, None), (None, None)):
        try:
            _, found = snapshot.find_provider_model(model, None, name, address)
        except LookupError:
            continue
        price = found.get_prices(at or datetime.now(UTC))
        if _field(price, "input_mtok") is not None:
            return ListedModel(price=_price(price), context=found.context_window, true_up_to=_first_step(price))
    return None


def _price(listed: ModelPrice) -> Price:
    base = {key: _nano(_field(listed, f"{key}_mtok")) for key in ("input", "output", "cache_read", "cache_write")}
    assert base["input"] is not None
    return Price(
        input=base["input"],
        output=base["output"] or NanoDollars(0),  # embeddings have no output
        cached_input=base["cache_read"],
        cache_write=base["cache_write"],
    )


def _field(listed: ModelPrice, key: str) -> Decimal | TieredPrices | None:
    return getattr(listed, key, None)


def _nano(value: Decimal | TieredPrices | None) -> NanoDollars | None:
    return None if value is None else to_nano(value.base if isinstance(value, TieredPrices) else value)


def _first_step(listed: ModelPrice) -> int | None:
    starts = [tier.start for value in vars(listed).values() if isinstance(value, TieredPrices) for tier in value.tiers]
    return min(starts, default=None)
