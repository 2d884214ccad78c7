# What two engines say to each other over TCP: both prove that they know the key, without sending it, and then one asks
# and the other answers. Each message is a JSON object, authenticated, with bytes behind it that it has checksums of.

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Callable
from hashlib import blake2b, sha256
from typing import Any

MAGIC = b"tollgate kv 1\n"
NONCE = 32  # bytes
PROOF = 32  # bytes of HMAC-SHA-256
TAG = 16  # bytes that authenticate a message
LENGTHS = struct.Struct("!IQ")  # bytes of the object, and of what follows it
LONGEST = 4 * 1024 * 1024  # bytes of an object: the hashes of a prompt of 800,000 tokens


class Refused(Exception):
    """The other side is no engine of this fleet, or says what makes no sense."""


def checksum(block_hash: bytes, data: memoryview) -> bytes:
    """Return the checksum of what a block of that hash holds: SHA-256, which processors have instructions for."""
    digest = sha256(block_hash)
    digest.update(data)
    return digest.digest()


class Link:
    """An authenticated connection. ``patience`` are the seconds that one message may take; both sides need the key."""

    def __init__(self, connection: socket.socket, key: bytes, *, asks: bool, patience: float) -> None:
        """Prove to each other that both know the key. Raises ``Refused``, and ``OSError``."""
        self._socket = connection
        self._patience = patience
        self._session = b""
        self._asks = asks
        self._sent = self._received = 0  # messages
        with_patience = self._until(patience)
        own = secrets.token_bytes(NONCE)
        self._send(MAGIC + own, with_patience)
        hello = bytes(self._receive(len(MAGIC) + NONCE, with_patience))
        if not hello.startswith(MAGIC):
            raise Refused("it speaks another protocol")
        theirs = hello[len(MAGIC) :]
        both = own + theirs if asks else theirs + own
        # Two that proved by the same words could be made to prove for each other.
        self._send(_proof(key, b"asks" if asks else b"answers", both), with_patience)
        proof = self._receive(PROOF, with_patience)
        if not hmac.compare_digest(bytes(proof), _proof(key, b"answers" if asks else b"asks", both)):
            raise Refused("it does not know the engines' secret")
        self._session = _proof(key, b"session", both)

    def send(self, message: dict[str, Any], data: bytes | memoryview = b"") -> None:
        """Send a message, and bytes that it has checksums of."""
        body = json.dumps(message, separators=(",", ":")).encode()
        head = LENGTHS.pack(len(body), len(data))
        tag = self._tag(self._asks, self._sent, head, body)
        self._sent += 1
        until = self._until(self._patience)
        self._send(head + tag + body, until)
        if data:
            self._send(data, until)

    def receive(self, most_data: int = 0, patience: float | None = None) -> tuple[dict[str, Any], memoryview]:
        """Wait for a message, with at most so many bytes behind it. ``patience``: for its beginning, if longer."""
        until = self._until(self._patience if patience is None else patience)
        head = bytes(self._receive(LENGTHS.size, until))
        until = self._until(self._patience)
        length, data_length = LENGTHS.unpack(head)
        if length > LONGEST or data_length > most_data:
            raise Refused("its message is too long")
        tag, body = bytes(self._receive(TAG, until)), bytes(self._receive(length, until))
        if not hmac.compare_digest(tag, self._tag(not self._asks, self._received, head, body)):
            raise Refused("its message was changed on the way")
        self._received += 1
        try:
            message = json.loads(body)
        except ValueError as exc:
            raise Refused("its message is no JSON") from exc
        if not isinstance(message, dict):
            raise Refused("its message is no object")
        return message, self._receive(data_length, until)

    @property
    def is_on_one_machine(self) -> bool:
        """Whether both ends have one address: the same machine, and the same network of it."""
        return bool(self._socket.getsockname()[:1] == self._socket.getpeername()[:1])

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _tag(self, asks: bool, number: int, head: bytes, body: bytes) -> bytes:
        own = blake2b(key=self._session, digest_size=TAG, person=b"asks" if asks else b"answers")
        own.update(number.to_bytes(8, "big") + head)
        own.update(body)
        return own.digest()

    def _until(self, patience: float) -> Callable[[], float]:
        """Return what says how many seconds are left."""
        end = time.monotonic() + patience
        return lambda: end - time.monotonic()

    def _send(self, data: bytes | memoryview, left: Callable[[], float]) -> None:
        view = memoryview(data)
        while view:
            self._socket.settimeout(max(left(), 0.001))
            view = view[self._socket.send(view) :]

    def _receive(self, length: int, left: Callable[[], float]) -> memoryview:
        view = whole = memoryview(bytearray(length))
        while view:
            self._socket.settimeout(max(left(), 0.001))
            count = self._socket.recv_into(view)
            if not count:
                raise ConnectionResetError("the other engine closed the connection")
            view = view[count:]
        return whole


def _proof(key: bytes, words: bytes, nonces: bytes) -> bytes:
    return hmac.new(key, MAGIC + words + b"\n" + nonces, sha256).digest()
