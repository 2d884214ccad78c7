# A team's own scores on a route: what its compared calls taught, over the shipped model's reading of a request.

from __future__ import annotations

import math

import numpy as np

from protocol.inference import Request
from router.complexity.classifier import Complexity
from router.learning import Learned, unpacked
from router.recalibration import SURE


def team_score(complexity: Complexity, data: bytes) -> TeamScore | None:
    """Return the scores that ``learning.packed`` holds; None where they were learned of another complexity model."""
    learned = unpacked(data, complexity.version)
    return None if learned is None else TeamScore(complexity, learned)


class TeamScore:
    """Scores requests by what a team's compared calls taught. A request without a text has the shipped score."""

    def __init__(self, complexity: Complexity, learned: Learned) -> None:
        self._complexity = complexity
        self.learned = learned

    def __call__(self, request: Request) -> float:
        """Return the chance that a small model suffices."""
        return self._told(request)[0]

    def interval(self, request: Request) -> tuple[float, float]:
        """Return the 95 % interval of that chance, as far as what was compared tells."""
        chance, spread = self._told(request)
        logit = math.log(chance / (1 - chance))
        low, high = ((1 + math.tanh((logit + by * spread) / 2)) / 2 for by in (-SURE, SURE))
        return low, high

    def _told(self, request: Request) -> tuple[float, float]:
        # The chance, and the standard deviation of its logit.
        score, form = self._complexity.with_form(request)
        if form is None:
            return score, 0.0
        chances, spreads = self.learned.chances(np.array([score]), form[None])
        return float(chances[0]), float(spreads[0])
