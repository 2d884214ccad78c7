# The usage record: one row for one call, and the statuses it may have. Frozen here because the journal writes it,
# the ledger stores it, statements add it up, and the audit compares all three.

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Status(StrEnum):
    """How a call ended."""

    ANSWERED = "answered"  # the whole answer was made
    INTERRUPTED = "interrupted"  # a part of an answer was sent
    FAILED = "failed"  # an upstream was reached, nothing was sent: the team pays nothing
    BLOCKED = "blocked"  # withheld by the content policy; charged what was used
    SUPERSEDED = "superseded"  # a batch attempt whose answer was never stored: the team pays nothing


REQUESTS = frozenset({Status.ANSWERED, Status.INTERRUPTED})  # those that statements count as requests
CHARGED = REQUESTS | {Status.BLOCKED}  # those whose tokens and cost the team owes


class Attempt(Struct, frozen=True, omit_defaults=True):
    """One try at one target."""

    target: str  # Target.key
    outcome: str  # "ok", or the error's code
    ms: float  # until the first token, or the failure


class UsageRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one call used and cost. Times are milliseconds, ``created_at`` unix seconds, money nano-dollars.

    ``request_id`` is a UUIDv7 as text; the UTC day inside it is the day of the row.
    """

    request_id: str
    team_id: str
    key_id: str
    endpoint: str  # "chat.completions", "completions", "embeddings", …
    model_asked: str
    model_used: str
    provider: str
    provider_endpoint: str  # region and base URL of the endpoint
    status: Status
    tier: str = "interactive"
    priority: str = "normal"
    input_tokens: int = 0
    cached_input_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cost_nanousd: int = 0
    gpu_cost_nanousd: int = 0
    queue_ms: float | None = None
    first_token_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    total_ms: float = 0.0
    route_reason: str = ""
    complexity: float | None = None
    attempts: tuple[Attempt, ...] = ()
    client_request_id: str | None = None
    user_tag: str | None = None
    metadata: dict[str, str] | None = None
    created_at: float = 0.0


def day_of(request_id: str) -> int:
    """Return the UTC day inside a UUIDv7, as days since 1970 (RFC 9562, section 5.7: 48 bits of unix milliseconds)."""
    return int(request_id[:8] + request_id[9:13], 16) // 86_400_000
