# What an engine says of itself to the gateways of its pool, in Redis, again and again: its heartbeat. A gateway sends
# prompts and the engine's key to the address that stands here, so each is signed with a secret that is sent nowhere.

from __future__ import annotations

import hmac
from collections.abc import Iterable
from hashlib import sha256

import msgspec
from msgspec import Struct
from msgspec.structs import replace

EVERY = 0.2  # seconds between heartbeats
KEY_LASTS = 60_000  # milliseconds after the last heartbeat of any replica of a pool
LONGEST = 16_384  # bytes of one
MAC_LENGTH = 64 + 1  # bytes before its JSON
PURPOSE = b"tollgate announcement 1\n"  # the secret signs nothing else in this form

# States, as an engine's GET /load has them: it loads its model and warms up; takes calls; takes none until it is woken;
# should get none; is no use.
STARTING, ACTIVE, SLEEPING, DRAINING, FAILED = "starting", "active", "sleeping", "draining", "failed"


class KvEventsAt(Struct, frozen=True):
    """Where a replica tells its KV events, and where again."""

    endpoint: str
    replay_endpoint: str | None = None


class Announcement(Struct, frozen=True, kw_only=True):
    """One replica, as it says itself."""

    pool: str
    instance_id: str  # another one after every start
    base_url: str  # where gateways ask it, with the version: http://10.0.0.5:8100/v1
    model: str
    version: str | None = None  # of the model, where a registry has it
    state: str  # of the engine: starting, active, sleeping, draining or failed
    number: int  # of this heartbeat: each is greater than the one before
    sent_at: float  # unix seconds, by the clock of the replica's machine
    block_size: int | None = None  # tokens; None until it is ready, as what follows
    max_model_len: int | None = None  # tokens
    kv_events: KvEventsAt | None = None
    adapters: tuple[str, ...] = ()  # of the model, by the names that calls ask for
    adapters_left_out: int = 0  # that it has besides, and an announcement has no room for
    answered: int = 0  # calls since its start that came to their end,
    failed: int = 0  # and those that the engine itself could not finish

    @property
    def names(self) -> frozenset[str]:
        """What the replica lets its model be called, and its adapters."""
        own = {self.model} if self.version is None else {self.model, f"{self.model}@{self.version}"}
        return frozenset({*own, *self.adapters})


def pool_key(pool: str) -> str:
    """Return the Redis hash of a pool's announcements, by instance id."""
    return f"tollgate:fleet:{{{pool}}}"


def fitting(said: Announcement) -> Announcement:
    """Return an announcement that is as long as one may be, without its last adapters if need be."""
    excess = len(msgspec.json.encode(said)) + MAC_LENGTH - LONGEST
    if excess <= 0:
        return said
    left, kept = excess + len(',"adapters_left_out":100000'), list(said.adapters)
    while kept and left > 0:
        left -= len(msgspec.json.encode(kept.pop())) + len(",")
    return replace(said, adapters=tuple(kept), adapters_left_out=len(said.adapters) - len(kept))


def signed(announcement: Announcement, secret: str) -> bytes:
    """Return an announcement as it stands in Redis: its HMAC-SHA-256 in hexadecimal, a space, and its JSON."""
    payload = msgspec.json.encode(announcement)
    return _mac(payload, secret).encode() + b" " + payload


def read_signed(value: bytes, secrets: Iterable[str]) -> Announcement | None:
    """Return the announcement if one of the secrets signed it. What is not signed is not read."""
    mac, _, payload = value[: LONGEST + 1].partition(b" ")
    if len(value) > LONGEST or not any(hmac.compare_digest(mac, _mac(payload, one).encode()) for one in secrets):
        return None
    try:
        return msgspec.json.decode(payload, type=Announcement)
    except msgspec.MsgspecError:
        return None


def _mac(payload: bytes, secret: str) -> str:
    return hmac.new(secret.encode(), PURPOSE + payload, sha256).hexdigest()
