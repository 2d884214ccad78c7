# What a team's key looks like and how it is stored: 256 random bits shown once, and only their HMAC-SHA-256 under the
# deployment's pepper stored. A reader of the table can neither use a digest as a key nor try keys against it.

from __future__ import annotations

import hashlib
import hmac
import secrets
from datetime import datetime
from functools import lru_cache

from msgspec import Struct

KEY_PREFIX = "tg-"
ADMIN_KEY_PREFIX = "tgadmin-"
JWT_PREFIX = "eyJ"  # '{"' in base64: every JWT begins so, and no key of ours does
NO_SECRET = "jwt"  # in the place of a secret's beginning, of a key that tokens stand for
SECRET_PREFIX = "ek_"  # of client secrets, as OpenAI's begin
SESSION_PREFIX = "tgsession-"  # of what the cookie of a person holds who has signed in

_SHOWN = 8  # characters of the secret part that may be shown, so that keys can be told apart


class StoredKey(Struct, frozen=True, kw_only=True):
    """What is known of any stored key: when it was made, ends and was used. The key itself is not stored."""

    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None  # to about a minute

    def status(self, now: datetime) -> str:
        """Return ``active``, ``expired`` or ``revoked``."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "active"


def new_key() -> str:
    """Return a fresh team key: ``tg-`` and 43 URL-safe characters."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def new_admin_key() -> str:
    """Return a fresh admin key: ``tgadmin-`` and 43 URL-safe characters."""
    return ADMIN_KEY_PREFIX + secrets.token_urlsafe(32)


def new_session_token() -> str:
    """Return the fresh secret of a session: ``tgsession-`` and 43 URL-safe characters."""
    return SESSION_PREFIX + secrets.token_urlsafe(32)


def key_digest(pepper: str, key: str) -> bytes:
    """Return the 32 bytes under which ``key`` is stored and looked up: the whole key, never a part of it."""
    state = _keyed(pepper).copy()
    state.update(key.encode("utf-8", "surrogateescape"))
    return state.digest()


@lru_cache
def _keyed(pepper: str) -> hmac.HMAC:
    """Return what has read the pepper: a copy costs two thirds of reading it anew."""
    return hmac.new(pepper.encode(), digestmod="sha256")


def pepper_name(pepper: str) -> str:
    """Return a short name for a pepper, the same everywhere, from which it cannot be found."""
    return hashlib.sha256(b"tollgate pepper\0" + pepper.encode()).hexdigest()[:12]


def shown_prefix(key: str) -> str:
    """Return the beginning of ``key`` that lists and logs may show; it says nothing about the rest."""
    return key[: len(KEY_PREFIX) + _SHOWN]


def shown_admin_prefix(key: str) -> str:
    """Return the beginning of an admin key that lists may show."""
    return key[: len(ADMIN_KEY_PREFIX) + _SHOWN]


def provider_fingerprint(key: str) -> str:
    """Return what tells one key of a provider from another and nothing about it: 32 bits of a digest."""
    return hashlib.sha256(key.encode()).hexdigest()[:8]


def label_of_provider_key(team: str, ident: str) -> str:
    """Return what a team's own key of a provider is sealed for: its row, and no other's."""
    return f"{team}/{ident}"


def fingerprint(key: str) -> str:
    """Return a short name for an admin key, the same at every start, from which the key cannot be found."""
    return hashlib.sha256(b"tollgate admin key\0" + key.encode("utf-8", "surrogateescape")).hexdigest()[:12]
