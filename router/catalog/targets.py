# What can answer: models of the catalogue, their endpoints, and the route a request takes over them.

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import cached_property

from msgspec import Struct
from msgspec.structs import replace

from billing.core.prices import Price, free


class Capability(StrEnum):
    """What a request may need of a model."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    IMAGES = "images"
    SPEECH = "speech"
    TRANSCRIPTION = "transcription"
    REALTIME = "realtime"
    TOOLS = "tools"
    JSON = "json"
    LOGPROBS = "logprobs"
    VISION = "vision"
    AUDIO = "audio"
    VOICE = "voice"


class Tier(StrEnum):
    """How soon an answer is wanted."""

    INTERACTIVE = "interactive"  # a client waits
    BATCH = "batch"  # within the day


class Endpoint(Struct, frozen=True):
    """One place where a provider answers."""

    region: str
    base_url: str  # without a trailing slash


class ModelSpec(Struct, frozen=True, kw_only=True):
    """A model of the catalogue, as tollgate.yaml has it."""

    name: str
    provider: str
    upstream_model: str
    price: Price
    batch_price: Price | None = None  # of what goes through the provider's Batch API; None: nothing does
    service_tiers: tuple[tuple[str, Price], ...] = ()  # tiers there, sooner or later than the usual, and their prices
    context: int  # tokens, prompt and reply together
    max_output: int  # tokens
    default_output: int | None = None  # tokens, where a request names no limit; None: max_output
    capabilities: frozenset[Capability]
    follows_engine: bool = False  # our own engine is still to say what more it can do: the file does not
    tiers: frozenset[Tier] = frozenset(Tier)
    parallel_n: bool = False  # each of several replies (``n``) is a request of its own there, whose prompt is billed
    weight: float = 1.0
    tokenizer: str | None = None  # that counts its prompts: a name or a path, as ``token_counts`` takes it
    gpu_hour_nanousd: int | None = None  # what an hour of one replica costs us; only for our own engine
    note: str | None = None  # said to clients, such as what a retired name now means
    others: tuple[ModelSpec, ...] = ()  # the same at other providers, which share its calls
    portion: float | None = None  # of its calls, beside those of the others; None: those that answer sooner come first

    @property
    def everywhere(self) -> tuple[ModelSpec, ...]:
        """The model at each of its providers."""
        return (self, *self.others)

    def price_in(self, tier: str) -> Price | None:
        """Return what answers cost in a tier of its provider; ``None``: it has no price of its own."""
        return next((price for name, price in self.service_tiers if name == tier), None)

    @property
    def usual_output(self) -> int:
        """The output limit of a request that names none, in tokens."""
        return self.max_output if self.default_output is None else self.default_output


class TeamKeys(Struct, frozen=True, omit_defaults=True):
    """What a team brought for one provider: its keys in their order, each with its id, sealed."""

    team: str
    sealed: tuple[tuple[str, bytes], ...] = ()


class Target(Struct, frozen=True, dict=True, omit_defaults=True):
    """One model at one endpoint, asked with the deployment's keys there or with a team's own."""

    model: ModelSpec
    endpoint: Endpoint
    own: TeamKeys | None = None

    @cached_property
    def key(self) -> str:
        """The name under which breakers and metrics know this target, with whichever keys it is asked."""
        return f"{self.model.provider}/{self.endpoint.region}/{self.endpoint.base_url}/{self.model.name}"

    @property
    def account(self) -> str:
        """The name under which is known what may differ from account to account."""
        return self.key if self.own is None else f"{self.key} of {self.own.team}"

    @cached_property
    def free_model(self) -> ModelSpec:
        """The model where its calls cost the deployment nothing."""
        model = self.model
        tiers = tuple((tier, free(price)) for tier, price in model.service_tiers)
        batch_price = None if model.batch_price is None else free(model.batch_price)
        return replace(model, price=free(model.price), batch_price=batch_price, service_tiers=tiers, others=())


class TargetHealth(Struct, frozen=True):
    """What is known of a target at the moment of choosing."""

    is_open: bool = False  # its breaker is open, or it is in cooldown after a 429
    is_full: bool = False  # more waits there than keeps it busy, or it takes nothing now, as it says itself
    first_token_ms: float = 0.0  # predicted; 0 when unknown


HEALTHY = TargetHealth()


class ComplexityDecision(Struct, frozen=True):
    """Whether a small model suffices, and what that rests on."""

    is_small: bool
    score: float  # the probability that a small model suffices for the newest turn
    quality: float  # that was asked
    turns_back: int = 0  # how many turns before the newest one decided
    shipped: float | None = None  # the score of the shipped model, where a team's own decided


class Route(Struct, frozen=True):
    """Targets in the order in which they are tried, and why.

    ``reason`` is a short stable word for headers, metrics and the ledger: ``named``, ``alias``, ``auto_small``,
    ``auto_large``, ``fallback``, ``canary``. ``complexity`` is the probability that a small model suffices,
    when it was asked; ``decision`` what an automatic route made of it. ``left_out`` says which models the call might
    have gone to beside, and by which words (``Shortcoming.code``) it may not: for routes of calls that are made.
    """

    asked: str  # the model as the caller wrote it
    targets: tuple[Target, ...]
    reason: str
    complexity: float | None = None
    decision: ComplexityDecision | None = None
    left_out: Mapping[str, tuple[str, ...]] | None = None

    def reason_at(self, target: Target) -> str:
        """Return the reason of a call that came to ``target``: one that asked for another model fell back to it."""
        is_other = self.reason in ("named", "alias") and target.model.name != self.targets[0].model.name
        return "fallback" if is_other else self.reason
