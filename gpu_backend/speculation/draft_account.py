# What drafts have brought and cost so far, in steps without them: whatever is wrong about acceptances and step times,
# no more time is lost by drafting than the allowance makes up for.

from __future__ import annotations

ALLOWANCE = 0.02  # of the time: what learning whether drafts pay may cost in the long run
MOST = 3.0  # steps that may be lost at once, while nothing is known yet


class DraftAccount:
    """Opens with ``MOST`` steps, earns the allowance with every step, and is never above ``MOST``.

    Drafts are made while it is not overdrawn, and one step takes ``MOST`` from it at most. So n steps lose by drafts
    no more than ``ALLOWANCE`` * n + 2 * ``MOST`` of their time; profit is not counted beyond what fills it.
    """

    def __init__(self) -> None:
        self.balance = MOST

    def earn(self) -> None:
        """Add the allowance of one step."""
        self.balance = min(MOST, self.balance + ALLOWANCE)

    def book(self, profit: float) -> None:
        """Record what a step with drafts gained over one without, in such steps; below 0 it lost."""
        self.balance = min(MOST, self.balance + max(profit, -MOST))

    @property
    def is_overdrawn(self) -> bool:
        """Whether drafts must wait."""
        return self.balance < 0
