# The usage record: one row for one call, and the statuses it may have. Frozen here because the journal writes it,
# the ledger stores it, statements add it up, and the audit compares all three.

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from operator import attrgetter
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from protocol.usage import UNITS, Usage

TOKENS = ("input_tokens", "cached_input_tokens", "cache_write_tokens", "output_tokens", "reasoning_tokens")
COSTS = ("cost_nanousd", "gpu_cost_nanousd")
MOST_TOKENS = 2**31 - 1  # of one call: what an integer column holds
MOST_NANOUSD = 2**53  # of one call, nine million dollars: what the counters and the daily sums can add up exactly
SAVINGS = ("saved_nanousd", "discount_nanousd")
MOST_OF_TOKENS = dict.fromkeys(TOKENS, MOST_TOKENS)
MOST = MOST_OF_TOKENS | dict.fromkeys((*COSTS, *SAVINGS), MOST_NANOUSD)
TOKENS_OF, UNITS_OF, QUANTITIES = attrgetter(*TOKENS), attrgetter(*UNITS), attrgetter(*MOST)

Counts = TypeVar("Counts", bound=Struct)


class Status(StrEnum):
    """How a call ended."""

    ANSWERED = "answered"  # the whole answer was made
    INTERRUPTED = "interrupted"  # a part of an answer was sent, or its client left while an upstream had its prompt
    FAILED = "failed"  # an upstream was reached, nothing was sent: the team pays nothing
    BLOCKED = "blocked"  # withheld by the content policy; charged what was used
    SUPERSEDED = "superseded"  # a batch attempt whose answer was never stored: the team pays nothing


REQUESTS = frozenset({Status.ANSWERED, Status.INTERRUPTED})  # those that statements count as requests
CHARGED = REQUESTS | {Status.BLOCKED}  # those whose tokens and cost the team owes


CACHED = "cached"  # the outcome of the one attempt of a call that the cache answered: no upstream was asked


OWN_KEY = "team"
HEDGE = "hedge"  # the route reason of a second attempt beside a first that was slow: a row beside its call's
HEDGE_LOST = "hedge_lost"  # the outcome, in the row of its call, of what has a row of its own


class Prefill(Struct, frozen=True):
    """A prompt that another replica computed for the one that was to reply."""

    target: str  # Target.key of that replica
    ms: float  # until it had answered
    gpu_seconds: float  # of its device, as it told


class Attempt(Struct, frozen=True, omit_defaults=True):
    """One try at one target."""

    target: str  # Target.key
    outcome: str  # "ok", or the word for how it failed, also in mid-stream
    ms: float  # until the first token, or the failure before it
    key: str | None = None  # OWN_KEY: asked with one of its team's own, not of the deployment's
    prefill: Prefill | None = None  # before it
    hedge: bool = False  # asked beside the first, which was slow


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
    units: dict[str, int] | None = None  # what else is priced (protocol.usage.UNITS), where there is any
    cost_nanousd: int = 0
    gpu_cost_nanousd: int = 0
    saved_nanousd: int = 0  # what the same answer would have cost, which came from the cache
    discount_nanousd: int = 0  # by how much it cost less than the same live call, for its tier
    queue_ms: float | None = None  # waited for its turn; first_token_ms and total_ms hold it too
    first_token_ms: float | None = None
    prefill_ms: float | None = None  # inside our own engine, where it said so,
    decode_ms: float | None = None  # of its slowest reply
    total_ms: float = 0.0
    route_reason: str = ""
    complexity: float | None = None
    attempts: tuple[Attempt, ...] = ()
    client_request_id: str | None = None
    user_tag: str | None = None
    metadata: dict[str, str] | None = None
    created_at: float = 0.0
    owner: str = ""  # the process that held the call: whose lease its row spends
    held_tokens: int = 0
    held_nanousd: int = 0
    price: str = ""  # the edition of the price that the cost was reckoned by
    held_models: tuple[str, ...] | None = None  # whose own limits the call held; none where its team sets none
    held_scopes: tuple[str, ...] | None = None  # of its end user and its tags, where they are limited
    left_out: Mapping[str, tuple[str, ...]] | None = None  # models beside its route, each with the words for why

    @property
    def is_cached(self) -> bool:
        """Whether the cache answered."""
        return self.attempts[-1:] != () and self.attempts[-1].outcome == CACHED


class Served(Struct, frozen=True, array_like=True):
    """Which target answers a call, as a record names it."""

    model_used: str
    provider: str
    provider_endpoint: str
    price: str = ""  # the edition of the price that it answers at; journals of earlier versions do not name it,
    route_reason: str = ""  # nor this

    def named_in(self, record: UsageRecord) -> UsageRecord:
        """Return ``record`` as one of a call that this target answers."""
        return replace(
            record,
            model_used=self.model_used,
            provider=self.provider,
            provider_endpoint=self.provider_endpoint,
            price=self.price or record.price,
            route_reason=self.route_reason or record.route_reason,
        )


def bounded(record: UsageRecord) -> UsageRecord:
    """Return ``record`` with every quantity inside what the ledger, the sums and the counters can hold.

    An upstream that reports nonsense costs its team the most there is, and not the row.
    """
    return _within(record, QUANTITIES(record), MOST)


def bounded_usage(usage: Usage) -> Usage:
    """Return ``usage`` inside what a record can hold."""
    return _within(usage, TOKENS_OF(usage), MOST_OF_TOKENS)


def units_of(usage: Usage) -> dict[str, int] | None:
    """Return what is priced in ``usage`` beside tokens, as a record has it."""
    counts = UNITS_OF(usage)
    return {name: count for name, count in zip(UNITS, counts, strict=True) if count} if any(counts) else None


def usage_of(record: UsageRecord) -> Usage:
    """Return what a record says was used."""
    return Usage(
        record.input_tokens,
        record.cached_input_tokens,
        record.output_tokens,
        record.reasoning_tokens,
        record.cache_write_tokens,
        **(record.units or {}),
    )


def bounded_cost(cost_nanousd: int) -> int:
    """Return a cost inside what a record can hold."""
    return cost_nanousd if 0 <= cost_nanousd <= MOST_NANOUSD else max(0, min(cost_nanousd, MOST_NANOUSD))


def _within(counts: Counts, quantities: tuple[int, ...], most: dict[str, int]) -> Counts:
    if min(quantities) >= 0 and max(quantities) <= MOST_TOKENS:
        return counts  # nearly always
    inside = {name: max(0, min(quantity, most[name])) for name, quantity in zip(most, quantities, strict=True)}
    return replace(counts, **inside)
