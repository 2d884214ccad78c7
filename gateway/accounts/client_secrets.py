# Client secrets: keys for one model's conversations by voice that a page of a browser may show. All that one stands for
# is sealed in it, so that none is stored: it ends by its time, and with the key that it was made with.

from __future__ import annotations

import base64

import msgspec

from gateway.core.keys import SECRET_PREFIX, key_digest
from gateway.core.principals import ClientSecret
from gateway.storage.encryption import Sealer, Unsealable
from protocol.errors import InvalidKey

PURPOSE = "client-secret"

_decoder = msgspec.json.Decoder(ClientSecret)


class ClientSecrets:
    """Makes and opens them."""

    def __init__(self, pepper: str, *others: str) -> None:
        self._pepper = pepper
        self._sealer = Sealer(pepper, PURPOSE, *others)

    def made(self, key: str, model: str, session: bytes, user: str | None, expires_at: float) -> str:
        """Return what a page is given, of the holder of a key. ``session`` is JSON."""
        digest, begins = key_digest(self._pepper, key), msgspec.Raw(session)
        secret = ClientSecret(digest=digest, model=model, session=begins, user=user, expires_at=expires_at)
        sealed = self._sealer.seal(msgspec.json.encode(secret), PURPOSE)
        return SECRET_PREFIX + base64.urlsafe_b64encode(sealed).decode().rstrip("=")  # which no subprotocol may have

    def opened(self, token: str) -> ClientSecret:
        """Return what a page was given. Raises InvalidKey."""
        try:
            sealed = base64.urlsafe_b64decode(token.removeprefix(SECRET_PREFIX) + "==")
            return _decoder.decode(self._sealer.unseal(sealed, PURPOSE))
        except (ValueError, Unsealable) as exc:
            raise InvalidKey("Incorrect client secret provided: it was made elsewhere, or changed.") from exc
