# Secrets and answers as Postgres may keep them: encrypted under a key that is derived from the deployment's pepper.
# While one pepper replaces another, what was sealed under either opens.

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

VERSION = b"\x01"  # AES-256-GCM under HKDF-SHA-256 of the pepper
NONCE_BYTES = 12


class Unsealable(Exception):
    """The bytes were not sealed under a pepper of this deployment and for this purpose, or were changed."""


class Sealer:
    """Seals bytes for one purpose (``"webhook-secret"``, ``"idempotency"``): what is sealed for one opens for no other.

    It seals under ``pepper`` and opens what was sealed under one of ``others``, too. ``label`` ties what is sealed to
    its place, such as its row's key, so that it cannot be moved to another.
    """

    def __init__(self, pepper: str, purpose: str, *others: str) -> None:
        self._cipher, *self._others = [_cipher(each, purpose) for each in (pepper, *others)]

    def seal(self, plain: bytes, label: str) -> bytes:
        """Return ``plain`` encrypted, with a version and a nonce in front."""
        nonce = os.urandom(NONCE_BYTES)
        return VERSION + nonce + self._cipher.encrypt(nonce, plain, label.encode())

    def unseal(self, sealed: bytes, label: str) -> bytes:
        """Return what was sealed. Raises Unsealable."""
        return self._open(sealed, label, [self._cipher, *self._others])

    def reseal(self, sealed: bytes, label: str) -> bytes:
        """Return what was sealed, sealed under the pepper if it was under another, else as it is. Raises Unsealable."""
        try:
            self._open(sealed, label, [self._cipher])
        except Unsealable:
            return self.seal(self._open(sealed, label, self._others), label)
        return sealed

    def _open(self, sealed: bytes, label: str, ciphers: Sequence[AESGCM]) -> bytes:
        version, nonce, body = sealed[:1], sealed[1 : 1 + NONCE_BYTES], sealed[1 + NONCE_BYTES :]
        if version != VERSION:
            raise Unsealable(f"sealed by another version: {version.hex()}")
        for cipher in ciphers:
            with suppress(InvalidTag, ValueError):
                return cipher.decrypt(nonce, body, label.encode())
        raise Unsealable("sealed under another pepper or for another place, or changed since")


def _cipher(pepper: str, purpose: str) -> AESGCM:
    kdf = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"tollgate " + purpose.encode())
    return AESGCM(kdf.derive(pepper.encode()))
