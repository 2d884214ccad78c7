# Events as receivers get them: in OpenAI's shape, signed as Standard Webhooks says
# (https://www.standardwebhooks.com, specification 1.0), so that stock libraries verify and read them.

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from gateway.core.clock import Clock

SECRET_PREFIX = "whsec_"

_ENCODER = msgspec.json.Encoder(decimal_format="number")


class Event(Struct, frozen=True, kw_only=True):
    """Something that a team wants to hear of. ``data`` may hold exact decimals."""

    id: str  # "evt_…", also the webhook-id: the same at every try
    type: str  # "batch.completed"
    created_at: float  # unix seconds
    data: dict[str, Any]

    @classmethod
    def now(cls, clock: Clock, type: str, data: dict[str, Any]) -> Event:
        """Return an event of this moment; ids grow with time."""
        event_id = f"evt_{clock.new_id().replace('-', '')}"
        return cls(id=event_id, type=type, created_at=clock.now(), data=data)

    def body(self) -> bytes:
        """Return the event as it is stored, signed and sent."""
        whole = {
            "id": self.id,
            "object": "event",
            "type": self.type,
            "created_at": int(self.created_at),
            "data": self.data,
        }
        return _ENCODER.encode(whole)


def shown_secret(secret: bytes) -> str:
    """Return a secret as receivers are given it: ``whsec_`` and Base64."""
    return SECRET_PREFIX + base64.b64encode(secret).decode()


def signed_headers(event_id: str, body: bytes, secrets: Sequence[bytes], now: float) -> dict[str, str]:
    """Return the three webhook headers for a try at ``now``, with one signature for each secret."""
    timestamp = str(int(now))
    content = f"{event_id}.{timestamp}.".encode() + body
    return {
        "webhook-id": event_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": " ".join(_sign(secret, content) for secret in secrets),
    }


def _sign(secret: bytes, content: bytes) -> str:
    return "v1," + base64.b64encode(hmac.digest(secret, content, hashlib.sha256)).decode()
