# One reply being generated: its tokens, its place in the KV cache, and how its tokens are chosen.

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from gpu_backend.step.adapter import NONE
from gpu_backend.step.draft_record import DraftRecord
from gpu_backend.step.messages import Embed, FinishReason, Generate, Timings
from gpu_backend.step.picture import Picture, parts_of
from gpu_backend.step.plan import UNKNOWN, SequenceStep, TokenLogprob
from gpu_backend.step.sampling_params import SamplingParams

if TYPE_CHECKING:
    from gpu_backend.step.grammar import Constraint


class Status(StrEnum):
    """Where a sequence is; the scheduler moves it."""

    WAITING = "waiting"  # without blocks, for its first admission
    FOLLOWING = "following"  # without blocks, for the prompt that it shares with another reply of its request
    RUNNING = "running"  # with blocks of the KV cache: in the next steps
    PREEMPTED = "preempted"  # waits before all newcomers, to be computed again
    SWAPPED = "swapped"  # the same, but what was computed lies in host memory
    FINISHED = "finished"  # ended, failed or aborted: the scheduler knows it no more


@dataclass(slots=True)
class Tenancy:
    """What fairness has to know of a sequence: its place, its waiting, and what its tenant was charged for it.

    Admission and the fair queue alone write it.
    """

    since: float = 0.0  # clock reading since when it waits, or runs
    place: int = 0  # in the order of first admissions; 0 before it
    passed: int = 0  # by how many later ones, because more of their prompts was cached, or of higher priority
    num_found: int = 0  # leading blocks that were in the cache when last looked, while it waited
    num_charged: int = 0  # tokens up to which its tenant's account is charged
    promised: int = 0  # tokens that it may still generate, as its tenant's account has it
    num_at_admission: int = 0  # tokens it had when it last got blocks
    is_aged: bool = False  # batch work that waited so long that it is preempted no more
    was_starved: bool = False  # it runs because it had waited, past those that went before it
    preempted_for_starved: bool = False  # it waits because it was preempted for such a one


@dataclass(slots=True)
class ReplyTimes:
    """When what happened to a sequence, in clock readings and in steps that had been computed."""

    arrived: float
    arrived_step: int = 0
    admitted: float | None = None
    first_token: float | None = None
    first_token_step: int | None = None
    gpu_seconds: float = 0.0  # its part of every step that computed for it

    def timings(self, now: float, step: int) -> Timings:
        """Return where its time went, if it ends now."""
        admitted = now if self.admitted is None else self.admitted
        first_token = now if self.first_token is None else self.first_token
        return Timings(
            queue_ms=(admitted - self.arrived) * 1e3,
            prefill_ms=(first_token - admitted) * 1e3,
            decode_ms=(now - first_token) * 1e3,
            gpu_seconds=self.gpu_seconds,
            first_token_steps=(step if self.first_token_step is None else self.first_token_step) - self.arrived_step,
        )


@dataclass(slots=True, eq=False)
class Sequence:
    """One reply, or one prompt to embed: its tokens, its blocks, and the clock readings its timings come from.

    The scheduler owns it. ``token_ids`` are the prompt and what was generated; the KV of the first ``num_computed`` of
    them lies in ``block_table``, or will when the steps that are planned are computed. ``num_awaited`` tokens more are
    being sampled by these. Both count drafts that the device makes as if they held, until the result tells. Clock
    readings are seconds of one monotonic clock.
    """

    sequence_id: int
    request: Generate | Embed
    sampling: SamplingParams  # the request's, the model's end tokens among its stop tokens
    limit: int  # tokens, prompt and reply together, at which it ends at the latest
    times: ReplyTimes
    reply_index: int = 0
    pools: bool = field(init=False)  # an embedding: hidden states are summed, nothing is sampled
    status: Status = Status.WAITING
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_awaited: int = 0
    is_discarded: bool = False  # what is under way follows numbers that were none: it is dropped, then computed again
    num_on_device: int = 0  # leading tokens that the device has the text of
    row: int = 0  # its place among those that run
    block_table: tuple[int, ...] = ()  # the same object until it changes: what was read need not be read again
    swapped: tuple[int, ...] = ()  # host blocks that hold its computed tokens while it waits; none: nothing does
    block_hashes: list[bytes] = field(default_factory=list)  # of the leading full blocks, as far as known
    num_published: int = 0  # leading blocks that others may find by hash
    cached_tokens: int | None = None  # prompt tokens found in the cache at the first admission
    tenancy: Tenancy = field(default_factory=Tenancy)
    followers: list[Sequence] = field(default_factory=list)  # replies that wait to share this one's prompt
    hidden_sum: list[float] = field(default_factory=list)  # of an embedding, over the tokens computed so far
    constraint: Constraint | None = None  # where ``token_ids`` stand in the grammar
    prompt_scores: list[TokenLogprob] = field(default_factory=list)  # of the prompt's tokens from the second on
    draft_record: DraftRecord | None = None  # how its drafts went; None until it is asked for one

    def __post_init__(self) -> None:
        self.pools = isinstance(self.request, Embed)
        self.token_ids = self.token_ids or list(self.request.prompt_token_ids)
        self.tenancy.since = self.times.arrived

    @property
    def is_preempted(self) -> bool:
        """Whether it waits to come back."""
        return self.status in (Status.PREEMPTED, Status.SWAPPED)

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.request.tenant

    @property
    def tier(self) -> str:
        """In which queue it waits."""
        return self.request.tier

    @property
    def prompt_marks(self) -> tuple[tuple[int, int], ...]:
        """Marks of its prompt's beginnings, and how many tokens each has."""
        return () if isinstance(self.request, Embed) else self.request.prompt_marks

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """Those of its prompt."""
        return () if isinstance(self.request, Embed) else self.request.pictures

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        """Tokens of the reply so far, those of another replica included."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def remaining(self) -> int:
        """Tokens that are known, or will be, but are in no step yet: 1 for a running decode."""
        return len(self.token_ids) + self.num_awaited - self.num_computed

    @property
    def num_to_plan(self) -> int:
        """Tokens that a step could compute: those that remain, but what follows one that may be its last is waited for.

        1 for a running decode.
        """
        known = len(self.token_ids) + self.num_awaited
        return 0 if self.num_awaited and (known >= self.limit or self.is_discarded) else known - self.num_computed

    @property
    def unscored_from(self) -> int | None:
        """The first position whose next token is still to be scored; None if none is."""
        if self.sampling.prompt_logprobs is None or self.reply_index > 0:
            return None
        scored = len(self.prompt_scores)
        return scored if scored < self.num_prompt - 1 else None

    def plan(self, num_tokens: int, block_size: int) -> SequenceStep:
        """Return a step that computes so many tokens, which have blocks. They count as computed from now on."""
        start, end = self.num_computed, self.num_computed + num_tokens
        sampling = self.sampling
        samples = end == len(self.token_ids) + self.num_awaited and not self.pools
        looks_back = samples and not sampling.is_plain and sampling.penalises_reply
        scores = sampling.prompt_logprobs is not None and self.unscored_from is not None
        token_ids = (UNKNOWN,) if self.num_awaited else tuple(self.token_ids[start:end])
        slack = max(0, self.num_awaited - 1)
        text, text_start = b"", 0
        if looks_back:
            text_start, self.num_on_device = self.num_on_device, end
            text = array("i", self.token_ids[text_start:]).tobytes()
        self.num_computed = end
        self.num_awaited += samples
        return SequenceStep(  # names would make up a third of what it takes
            self.sequence_id,
            token_ids,
            start,
            self.block_table[: -(-end // block_size)],
            samples,
            sampling,
            self.reply_index,
            self.pools,
            self.num_prompt,
            self.request.prompt_token_ids[start + 1 : end + 1] if scores else (),
            self.constraint if samples else None,
            row=self.row,
            slack=slack,
            text=text,
            text_start=text_start,
            adapter=NONE if self.request.adapter is None else self.request.adapter.number,
            moved=max([each.moves for each in self.pictures if each.end <= start], default=0) if self.pictures else 0,
            pictures=parts_of(self.pictures, self.request.prompt_token_ids, start, end) if self.pictures else (),
        )

    def append(self, token_id: int) -> FinishReason | None:
        """Take the next token; return why the sequence ends with it, or None."""
        self.token_ids.append(token_id)
        if token_id in self.sampling.stop_token_ids:
            return FinishReason.STOP
        if len(self.token_ids) >= self.limit:
            return FinishReason.LENGTH
        return None

    def restart(self) -> None:
        """Forget what was computed, but not what was generated: the blocks are gone."""
        self.num_computed = 0
        self.num_published = 0
        self.block_table = ()
        self.hidden_sum = []
