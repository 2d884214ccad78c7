# What crosses between the HTTP front end and the process that owns the device: commands in, events out.
# Frozen dataclasses, pickled over a pipe; nothing here needs torch or the web stack.

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from gpu_backend.step.adapter import Adapter
from gpu_backend.step.block_events import BlockEvent
from gpu_backend.step.config import EngineConfig
from gpu_backend.step.cost import StepCost
from gpu_backend.step.picture import Picture
from gpu_backend.step.plan import TokenLogprob
from gpu_backend.step.sampling_params import SamplingParams
from gpu_backend.step.transfer import HeldBlocks, RemoteBlocks

LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1000  # of a tenant, whose service is divided by it
PRIORITIES = ("low", "normal", "high")  # of a request among its tenant's


@dataclass(frozen=True, slots=True)
class Generate:
    """Make ``n`` replies to one prompt. ``resume_token_ids`` are tokens another replica already made (n must be 1).

    Replies are numbered from ``first_reply`` on: one of several that is resumed alone keeps its number, and its noise.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    tenant: str = ""
    cache_salt: str | None = None  # of its tenant's prompts, those alone that say the same are found cached
    weight: float = 1.0
    tier: str = "interactive"
    priority: str = "normal"
    deadline_ms: int | None = None
    resume_token_ids: tuple[int, ...] = ()
    first_reply: int = 0
    prompt_marks: tuple[tuple[int, int], ...] = ()  # of the prompt's beginnings, and how many tokens each has
    adapter: Adapter | None = None  # None: the model as it is
    remote: RemoteBlocks | None = None  # where another engine holds the prompt's blocks; what does not come is computed
    pictures: tuple[Picture, ...] = ()  # in the prompt, in their order there
    holds_blocks: bool = False  # keep the prompt's blocks for another engine; the last event says where they are


@dataclass(frozen=True, slots=True)
class Embed:
    """Compute one pooled, normalised vector for a prompt."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    tenant: str = ""
    tier: str = "interactive"
    priority: str = "normal"
    weight: float = 1.0
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop a request, or one of its replies; its blocks are free in the next step."""

    request_id: str
    reply_index: int | None = None  # None: all of them


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no more work, finish what runs, report ``Drained``."""


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Load an adapter beside those that there are; ``AdapterLoaded`` answers. No reply waits for it."""

    adapter: Adapter


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Let an adapter go when no reply has it any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Sleep:
    """Let what runs end, then give the device's memory back: weights go to host memory, the KV cache is dropped."""

    number: int  # that ``SleepAnswer`` has


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Take the device's memory again; a ``Sleep`` that is not carried out yet is off."""

    number: int


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Let the model go and load another one in the same process, which sleeps: ``Ready`` answers, or its end."""

    config: EngineConfig


Command = Generate | Embed | Abort | Drain | LoadAdapter | UnloadAdapter | Sleep | WakeUp | LoadModel


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a reply's time went. Milliseconds, but for ``gpu_seconds``: its part of every step that computed for it.

    ``first_token_steps``: steps that the engine computed from its arrival to its first token, that one included.
    """

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    gpu_seconds: float
    first_token_steps: int = 0


class FinishReason(StrEnum):
    """Why a sequence stopped."""

    STOP = "stop"  # an end-of-sequence token, a stop token, or a stop string seen by the front end
    LENGTH = "length"  # max_tokens, or the model's context is full
    ABORT = "abort"  # the caller left or cancelled
    ERROR = "error"  # this request alone could not be served; the engine goes on


@dataclass(slots=True)  # never changed; frozen, it takes five times as long to make, hundreds a step
class NewTokens:
    """Tokens of one reply, as they come. The last event of a reply has a ``finish_reason``.

    It has ``timings`` too, unless the request was refused on arrival. A stop token is among the ``token_ids``.
    """

    request_id: str
    reply_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0  # prompt tokens found in the prefix cache; known with the first event
    gpu_seconds: float = 0.0  # device time of this reply so far
    timings: Timings | None = None
    error: str | None = None  # with FinishReason.ERROR: what the caller can do about it
    is_bad_grammar: bool = False  # the error is one of the request's grammar
    prompt_scores: tuple[TokenLogprob, ...] = ()  # if asked for, with the first token: the prompt's from the second on
    held: HeldBlocks | None = None  # with the last token, if the prompt's blocks are kept for another engine


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine does not take a request now, all its replies: another replica, or this one later, may."""

    request_id: str
    reason: str  # for the caller, a whole sentence
    retry_after: float  # seconds


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of an ``Embed``, or why there is none."""

    request_id: str
    vector: tuple[float, ...] = ()
    timings: Timings | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """The weights are loaded and steps can run. Sent once, first."""

    total_blocks: int
    block_size: int
    max_model_len: int
    device: str
    dtype: str
    step_cost: StepCost | None = None  # as measured or told; None: nothing is predicted
    keeps_states: bool = False  # no prompt finds another's blocks


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The engine's state, sent when it changes and at least once a second. Rates are over the last ten seconds."""

    queue_depth: int
    running: int
    free_blocks: int  # unused and cached-but-evictable
    total_blocks: int
    kv_utilization: float  # blocks in use over all; evictable ones not counted
    tokens_per_second: float
    requests_per_second: float
    prefix_hit_rate: float  # prompt tokens found in the cache over prompt tokens seen
    steps: int = 0
    gpu_busy_seconds: float = 0.0
    roofline_share: float = 0.0  # of the busy time: what the device could not have done without; 0: not known, or idle
    counters: dict[str, float] = field(default_factory=dict)
    running_adapters: tuple[str, ...] = ()  # names of those that replies run with, and that others wait for
    waiting_adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BlocksChanged:
    """What the prefix cache gained and lost in a step, in its order. Sent where events are published."""

    events: tuple[BlockEvent, ...]


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing is running any more, and nothing will be taken."""


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """Requests may ask for an adapter now; or what is wrong with it."""

    number: int
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class SleepAnswer:
    """A ``Sleep`` or ``WakeUp`` was carried out, or what kept it from that."""

    number: int
    problem: str | None = None


Event = Ready | NewTokens | Embedding | Refused | LoadReport | BlocksChanged | Drained | AdapterLoaded | SleepAnswer
