# JSON as the gateway's own routes answer in it: money stays exact.

from __future__ import annotations

import msgspec

_ENCODER = msgspec.json.Encoder(decimal_format="number")


def to_json(value: object) -> bytes:
    """Return ``value`` as JSON, in which a Decimal is a number with exactly its digits."""
    return _ENCODER.encode(value)
