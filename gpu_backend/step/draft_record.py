# What is known of how one sequence's drafts go.

from __future__ import annotations

from dataclasses import dataclass, field

MEMORY = 0.9  # how much of what was learnt of a sequence counts after its next drafts
LONG_MEMORY = 0.98  # the same, of all sequences
FIRST_ONES = 4  # times that a sequence's drafts count for all
TRIED = 4.0  # drafts that what is expected of a new sequence weighs
FIRST_PAUSE, LONGEST_PAUSE = 8, 512  # steps between two probes of a sequence whose drafts do not pay
PROBE = 0.7  # the acceptance that a probe is planned with; what the first sequences are trusted with, too


@dataclass(slots=True)
class Acceptance:
    """How many drafts held of those tried, up to the first that failed; older ones count for less."""

    held: float
    tried: float

    @property
    def chance(self) -> float:
        """The chance that a draft holds if those before it did."""
        return self.held / self.tried

    def learn(self, num_draft_tokens: int, num_held: int, memory: float) -> None:
        """Take note of one reply's drafts in one step."""
        self.held = memory * self.held + num_held
        self.tried = memory * self.tried + min(num_held + 1, num_draft_tokens)


class DraftPrior:
    """What replies' first drafts came to: what a new one is trusted with. It opens with ``PROBE``."""

    def __init__(self) -> None:
        self._acceptance = Acceptance(TRIED * PROBE, TRIED)

    def open_record(self, is_allowed: bool) -> DraftRecord:
        """Return the record of a new reply."""
        return DraftRecord(is_allowed, Acceptance(TRIED * self._acceptance.chance, TRIED))

    def learn(self, record: DraftRecord, num_draft_tokens: int, num_held: int) -> None:
        """Take note of a step's drafts for one reply; one with many counts no more than others."""
        record.acceptance.learn(num_draft_tokens, num_held, MEMORY)
        record.num_verified += 1
        if record.num_verified <= FIRST_ONES:
            self._acceptance.learn(num_draft_tokens, num_held, LONG_MEMORY)


@dataclass(slots=True)
class DraftRecord:
    """How one sequence's drafts went."""

    is_allowed: bool
    acceptance: Acceptance
    num_verified: int = 0
    is_paused: bool = False
    pause: int = FIRST_PAUSE
    text: bytearray = field(default_factory=bytearray)  # its tokens, int32 each, as far as they were looked at

    @property
    def trust(self) -> float:
        """The chance that drafts are planned with: a probe gets some on credit."""
        return max(PROBE, self.acceptance.chance) if self.is_paused else self.acceptance.chance

    def is_due(self, step: int) -> bool:
        """Whether it may be asked for drafts in that step."""
        # Probes of several sequences fall into the same steps, where they share what drafting costs at all.
        return self.is_allowed and not (self.is_paused and step % self.pause)

    def plan(self, num_drafts: int) -> None:
        """Take note of how many drafts a step takes in; after a probe its acceptance alone decides."""
        if not num_drafts:
            self.is_paused = True
        elif self.is_paused:
            self.is_paused, self.pause = False, min(2 * self.pause, LONGEST_PAUSE)
        else:
            self.pause = FIRST_PAUSE
