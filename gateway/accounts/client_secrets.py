# Client secrets: keys for one model's conversations by voice that a page of a browser may show. All that one stands for
# is sealed in it, so that none is stored: it ends by its time, and with the key that it was made with.

from __future__ import annotations

import base64

import msgspec
from msgspec.structs import replace

from gateway.core.keys import SECRET_PREFIX, key_digest, pepper_name
from gateway.core.principals import ClientSecret
from gateway.storage.encryption import Sealer, Unsealable
from protocol.errors import InvalidKey

PURPOSE = "client-secret"

_decoder = msgspec.json.Decoder(ClientSecret)


class ClientSecrets:
    """Makes and opens them."""

    def __init__(self, pepper: str, *others: str) -> None:
        self._peppers = {pepper_name(each): each for each in (pepper, *others)}
        self._sealer = Sealer(pepper, PURPOSE, *others)

    def made(self, key: str, model: str, session: bytes, user: str | None, expires_at: float) -> str:
        """Return what a page is given, of the holder of a key. ``session`` is JSON."""
        digests, begins = {name: key_digest(each, key) for name, each in self._peppers.items()}, msgspec.Raw(session)
        secret = ClientSecret(digests=digests, model=model, session=begins, user=user, expires_at=expires_at)
        sealed = self._sealer.seal(msgspec.json.encode(secret), PURPOSE)
        return SECRET_PREFIX + base64.urlsafe_b64encode(sealed).decode().rstrip("=")  # which no subprotocol may have

    def opened(self, token: str) -> ClientSecret:
        """Return what a page was given, with its key's digests under the peppers of now, the one in force first: a
        part of them would find no key that is stored under another. Raises InvalidKey."""
        try:
            sealed = base64.urlsafe_b64decode(token.removeprefix(SECRET_PREFIX) + "==")
            secret = _decoder.decode(self._sealer.unseal(sealed, PURPOSE))
            return replace(secret, digests={name: secret.digests[name] for name in self._peppers})
        except (ValueError, KeyError, Unsealable) as exc:
            words = "it was made elsewhere, or before another pepper, or changed. Make another one."
            raise InvalidKey(f"Incorrect client secret provided: {words}") from exc
