# What a picture costs where that goes by its quality and size, as a table of providers has it: a row for each.

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from billing.core.money import NanoDollars

AUTO = "auto"  # left to the provider


class PicturePrice(Struct, frozen=True, kw_only=True):
    """One row. ``None``: whichever it is."""

    quality: str | None = None
    size: str | None = None  # WIDTHxHEIGHT
    price: NanoDollars


def fitting(rows: Sequence[PicturePrice], quality: str | None, size: str | None) -> tuple[PicturePrice, ...]:
    """Return the rows that a picture may be charged by which is asked for so; none: what it costs is not known."""
    return tuple(row for row in rows if _fits(row.quality, quality) and _fits(row.size, size))


def charged(rows: Sequence[PicturePrice], quality: str | None, size: str | None) -> NanoDollars:
    """Return what a picture costs of which its provider tells so much: where the rows still differ, by those for what
    is left to the provider, and else the most."""
    found = fitting(rows, quality, size) or rows
    left_open = [row.price for row in found if AUTO in (row.quality, row.size)]
    return max(left_open or [row.price for row in found])


def _fits(named: str | None, asked: str | None) -> bool:
    return named is None or asked in (None, AUTO, named)
