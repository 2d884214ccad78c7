# What is known of how one sequence's guesses go.

from __future__ import annotations

from dataclasses import dataclass, field

MEMORY = 0.9  # how much of what was learnt of a sequence counts after its next guesses
FIRST_PAUSE, LONGEST_PAUSE = 8, 512  # steps between two probes of a sequence whose guesses do not pay
PROBE = 0.7  # the acceptance that a probe is planned with; what a new sequence is trusted with, too


@dataclass(slots=True)
class GuessRecord:
    """How one sequence's guesses went. ``tried`` counts guesses up to the first that failed, older ones for less."""

    is_allowed: bool
    held: float = 2 * PROBE
    tried: float = 2.0
    is_paused: bool = False
    pause: int = FIRST_PAUSE
    text: bytearray = field(default_factory=bytearray)  # its tokens, int32 each, as far as they were looked at

    @property
    def acceptance(self) -> float:
        """The chance that a guess holds if those before it did."""
        return self.held / self.tried

    def learn(self, num_proposed: int, num_held: int) -> None:
        """Take note of a step's guesses."""
        self.held = MEMORY * self.held + num_held
        self.tried = MEMORY * self.tried + min(num_held + 1, num_proposed)
        if num_held:
            self.is_paused, self.pause = False, FIRST_PAUSE
        elif self.is_paused:
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
