# Secrets and answers as Postgres may keep them: encrypted under a key that is derived from the house's pepper.

from __future__ import annotations

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

VERSION = b"\x01"  # AES-256-GCM under HKDF-SHA-256 of the pepper
NONCE_BYTES = 12


class Unsealable(Exception):
    """The bytes were not sealed under this pepper and for this purpose, or were changed."""


class Sealer:
    """Seals bytes for one purpose (``"webhook-secret"``, ``"idempotency"``): what is sealed for one opens for no other.

    ``label`` ties what is sealed to its place, such as its row's key, so that it cannot be moved to another.
    """

    def __init__(self, pepper: str, purpose: str) -> None:
        kdf = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"tollgate " + purpose.encode())
        self._cipher = AESGCM(kdf.derive(pepper.encode()))

    def seal(self, plain: bytes, label: str) -> bytes:
        """Return ``plain`` encrypted, with a version and a nonce in front."""
        nonce = os.urandom(NONCE_BYTES)
        return VERSION + nonce + self._cipher.encrypt(nonce, plain, label.encode())

    def unseal(self, sealed: bytes, label: str) -> bytes:
        """Return what was sealed. Raises Unsealable."""
        version, nonce, body = sealed[:1], sealed[1 : 1 + NONCE_BYTES], sealed[1 + NONCE_BYTES :]
        if version != VERSION:
            raise Unsealable(f"sealed by another version: {version.hex()}")
        try:
            return self._cipher.decrypt(nonce, body, label.encode())
        except (InvalidTag, ValueError) as exc:
            raise Unsealable("sealed under another pepper or for another place, or changed since") from exc
