# What a price library may say of a model.

from __future__ import annotations

from msgspec import Struct

from billing.core.prices import Price


class ListedModel(Struct, frozen=True, kw_only=True):
    """A model as the library lists it."""

    price: Price
    context: int | None  # tokens
    has_output: bool  # whether the price says what answers cost; vectors have no such price


class NoPrice(Struct, frozen=True):
    """The library cannot say what the model costs."""

    why: str  # "the price library …"
