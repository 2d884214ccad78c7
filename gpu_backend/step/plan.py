# What the step loop hands the runner, and what it gets back: the seam between scheduling and computing.
# Only numbers cross it, so a runner may live on another device, in a CUDA graph or across ranks; but for constraints,
# whose masks are asked for while the device computes.

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gpu_backend.step.adapter import NONE
from gpu_backend.step.picture import PicturePart
from gpu_backend.step.sampling_params import SamplingParams

if TYPE_CHECKING:
    from gpu_backend.step.grammar import Constraint

# In place of a token that is still being sampled: the last one of the sequence's row, on the device. In place of a
# draft: one that the device is to make.
UNKNOWN = -1
TEXT_WINDOW = 4096  # last tokens of a text from which the device drafts


@dataclass(slots=True)  # never changed; frozen, it takes five times as long to make, hundreds a step
class SequenceStep:
    """One sequence's share of a step: compute ``token_ids`` at positions ``start``, ``start + 1``, ….

    ``block_table[i]`` is the KV block that holds positions ``i * block_size`` to ``(i + 1) * block_size - 1``; it
    covers every position up to and including the last one computed here. ``samples`` is true when the last token's
    logits are to be turned into the sequence's next token: always for a decode, and for the last chunk of a prefill.

    A step may be planned before the tokens of the one before are known: the token is ``UNKNOWN`` then. ``row`` is the
    sequence's place among those that run, for as long as it runs.
    """

    sequence_id: int
    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    samples: bool
    sampling: SamplingParams
    reply_index: int  # which of the request's n replies; part of the noise
    pools: bool = False  # an embedding: return the sum of the final hidden states over ``token_ids``
    num_prompt: int = 0  # positions that are the prompt's; the next token's number in the reply follows from it
    targets: tuple[int, ...] = ()  # prompt tokens to score: each follows the one at its place in ``token_ids``
    constraint: Constraint | None = None  # knows which tokens may come next; None: all
    num_draft_tokens: int = 0  # at the end of ``token_ids``, drafts; each place before one is sampled too
    row: int = 0
    # What the draft model is to compute first: known tokens that it lacks, at positions from ``draft_start`` on. If
    # they reach up to the last known one, it drafts ``num_to_draft`` tokens, for which the block table has room.
    draft_ids: tuple[int, ...] = ()
    draft_start: int = 0
    num_to_draft: int = 0
    # Planned before it is known how many drafts of the step before held: so many tokens earlier than ``start`` it may
    # begin. The device knows.
    slack: int = 0
    # Tokens from position ``text_start`` on that the device does not know of, int32 each: given where it is to draft,
    # and where sampling looks back.
    text: bytes = b""
    text_start: int = 0
    drafted: tuple[int, ...] = ()  # drafts that sampling looks back at, too: those behind the known tokens
    adapter: int = NONE  # the number of the sequence's
    moved: int = 0  # by how many positions pictures that lie before it have moved it forward
    pictures: tuple[PicturePart, ...] = ()  # whose vectors stand in the places of some of ``token_ids``

    @property
    def num_known(self) -> int:
        """Leading ``token_ids`` that are the sequence's for sure."""
        return len(self.token_ids) - self.num_draft_tokens

    @property
    def num_unsure(self) -> int:
        """Drafts that the device makes: tokens that the step may bring beside the one that it brings for sure."""
        return self.num_draft_tokens if self.token_ids[-1] == UNKNOWN else 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the model computes for the sequence."""
        return len(self.token_ids) + self.num_to_draft

    @property
    def num_generated(self) -> int:
        """Tokens that the reply has before the one sampled here."""
        return self.start + len(self.token_ids) - self.num_prompt


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy a KV block, all layers of it, from the device to host memory or back."""

    source: int
    target: int
    to_host: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything one step computes: running decodes first, then chunks of prefills, within the token budget.

    ``copies`` come before that, one after the other: what one writes another may read, and its place be written again.
    Before them the runner puts zeros into the slots to be ``cleared``, in which drafts left what is not a number.
    A ``is_rehearsal`` is of no request: a graph that it could be computed by is captured at once.
    """

    step: int
    sequences: tuple[SequenceStep, ...]
    copies: tuple[BlockCopy, ...] = ()
    cleared: tuple[int, ...] = ()
    is_rehearsal: bool = False

    @property
    def is_ahead(self) -> bool:
        """Whether it takes from the device where sequences begin, or what they draft."""
        return any(step.slack or step.num_unsure for step in self.sequences)

    @property
    def may_be_followed(self) -> bool:
        """Whether the next one may be planned before its result: the host's own drafts must be judged first."""
        return all(step.num_draft_tokens == step.num_unsure and not step.draft_ids for step in self.sequences)

    @property
    def num_tokens(self) -> int:
        """Tokens that this step computes."""
        return sum(s.num_tokens for s in self.sequences)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token, and of the most likely alternatives in falling order."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What a step brought one sequence.

    With drafts these are one token more than held; none at all means that its numbers were not finite: it keeps what it
    had, and is to be computed again without drafts.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob | None, ...] = ()
    hidden_sum: tuple[float, ...] = ()  # of a sequence that ``pools``, after the final norm
    scores: tuple[TokenLogprob, ...] = ()  # of its ``targets``
    has_failed: bool = False  # its numbers were not finite: it fails alone


@dataclass(frozen=True, slots=True)
class StepResult:
    """The next token of each sequence of the plan that ``samples``, in the plan's order.

    Where some sequence got more than that, or less, there are ``outputs`` instead, one for each of the plan.
    ``seconds`` is the device time of the step, ``least_seconds`` what it could be at best; 0: not known.
    """

    step: int
    token_ids: tuple[int, ...]
    seconds: float
    outputs: tuple[SequenceOutput, ...] = ()
    least_seconds: float = 0.0


class DeviceLost(Exception):
    """What a runner raises that cannot go on, whatever comes next: its process ends, and a new one may."""


class Launched(Protocol):
    """A step that is under way."""

    def sample(self) -> None:
        """Sample what is not sampled yet: replies whose grammar had to hear of the step before. Call it once."""
        ...

    def result(self) -> StepResult:
        """Wait for the step. Raises what went wrong on the device."""
        ...


class StepRunner(ABC):
    """Computes step plans; the real one is ``runner.Runner``. Steps are computed in the order of their launches."""

    # Whether ``launch`` comes back before the step is computed, so that there is something to gain by launching a step
    # before the last one's result is read.
    is_asynchronous = False
    keeps_states = False  # of sequences, beside their blocks: from these alone nothing can go on
    most_ahead = 0  # decodes that the device drafts for by itself, and of which it knows where the next step begins

    @abstractmethod
    def launch(self, plan: StepPlan) -> Launched:
        """Begin to compute a step. Raises what went wrong: for this step alone, or ``DeviceLost`` for all."""

    def sleep(self) -> None:  # noqa: B027 (a runner without a device has nothing to give)
        """Give the device's memory back, while no step is under way; what is in the KV cache is lost."""

    def wake_up(self) -> None:  # noqa: B027
        """Take it again. Raises where another has it meanwhile."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A step that was computed at once."""

    outcome: StepResult

    def sample(self) -> None:
        """Do nothing: the tokens are there."""

    def result(self) -> StepResult:
        """Return the outcome."""
        return self.outcome


class AtOnce(StepRunner):
    """A runner that computes a step when it is launched: all of it is ``run``."""

    @abstractmethod
    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step."""

    def launch(self, plan: StepPlan) -> Launched:
        """Compute a step."""
        return Computed(self.run(plan))
