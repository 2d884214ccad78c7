# What a key looks like, and what is kept of it.

from __future__ import annotations

import hashlib
import re

from gateway.core.keys import fingerprint, key_digest, new_admin_key, new_key, shown_prefix


def test_new_key_is_a_prefix_and_256_bits() -> None:
    """A team key is ``tg-`` and 43 URL-safe characters, and no two are the same."""
    keys = {new_key() for _ in range(100)}

    assert len(keys) == 100
    assert all(re.fullmatch(r"tg-[A-Za-z0-9_-]{43}", key) for key in keys)
    assert re.fullmatch(r"tgadmin-[A-Za-z0-9_-]{43}", new_admin_key())


def test_digest_depends_on_the_pepper_and_on_every_character() -> None:
    """A digest is an HMAC of the whole key: keys that share a long beginning have nothing in common."""
    key = new_key()
    neighbour = key[:-1] + ("A" if key[-1] != "A" else "B")

    assert key_digest("pepper", key) == key_digest("pepper", key)
    assert key_digest("pepper", key) != key_digest("salt", key)
    assert key_digest("pepper", key) != key_digest("pepper", neighbour)
    assert key_digest("pepper", key) != hashlib.sha256(key.encode()).digest()


def test_digest_takes_any_text_a_header_can_carry() -> None:
    """Nonsense in the Authorization header is an unknown key, never a crash."""
    nonsense = b"\xff\xfe' OR 1=1 --".decode("utf-8", "surrogateescape")

    assert len(key_digest("pepper", nonsense)) == 32
    assert len(fingerprint(nonsense)) == 12


def test_shown_prefix_gives_little_away() -> None:
    """People tell keys apart by eight characters of the secret, which leaves 210 bits."""
    key = new_key()

    assert key.startswith(shown_prefix(key))
    assert len(shown_prefix(key)) == len("tg-") + 8
