# What steps of decodes take, with drafts and without, as measured: the cost table's prediction times what such steps
# took of it lately. A product with a vector is no product with a matrix, and a verification has graphs of its own: a
# line through both is wrong where it matters, so each kind has its own curve over the number of tokens.

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from gpu_backend.step.cost import StepCost, StepWork

REMEMBERED = 5  # steps of about one size
ENOUGH = 2  # of them, to be trusted: the first may have been held up, or have captured a graph


class _Point(NamedTuple):
    place: float  # log2 of the tokens
    ratio: float  # of the seconds to the prediction
    predicted: float


class Curve:
    """How measured seconds compare with predicted ones, by the number of tokens; two sizes to each doubling."""

    def __init__(self) -> None:
        self._sizes: dict[int, deque[_Point]] = {}
        self._points: list[_Point] = []  # one for each size
        self._slope = 0.0  # seconds for each predicted one, beyond the largest size

    def learn(self, tokens: int, predicted: float, seconds: float) -> None:
        """Take note of a step."""
        size = self._sizes.setdefault(_size_of(tokens), deque(maxlen=REMEMBERED))
        size.append(_Point(math.log2(tokens), seconds / predicted, predicted))
        trusted = [found for found in self._sizes.values() if len(found) >= ENOUGH] or self._sizes.values()
        # Whatever holds a step up makes it longer: of up to four the quickest counts, of five the second.
        undisturbed = (sorted(found, key=lambda point: point.ratio)[(len(found) - 1) // 4] for found in trusted)
        self._points = sorted(undisturbed)
        self._slope = _slope(self._points)

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._points)

    def num_measured(self, tokens: int) -> int:
        """Return how many steps of about that size are remembered."""
        return len(self._sizes.get(_size_of(tokens), ()))

    def seconds(self, tokens: int, predicted: float) -> float:
        """Say what a step takes for which so much is predicted: between measured sizes their ratios tell.

        Below the smallest its ratio tells; beyond the largest what they had in common. Without any: what is predicted.
        """
        points = self._points
        if not points:
            return predicted
        place, last = math.log2(tokens), points[-1]
        if place >= last.place:
            more = max(0.0, predicted - last.predicted)
            return last.ratio * (predicted - more) + self._slope * more
        below = above = points[0]
        for above in points:
            if above.place > place:
                break
            below = above
        share = (place - below.place) / (above.place - below.place) if above is not below else 0.0
        return predicted * (below.ratio + (above.ratio - below.ratio) * max(share, 0.0))


class StepTimes:
    """Predicts steps of decodes. As long as nothing is measured, ``cost`` alone does: then its unit is no second."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._plain, self._with_drafts = Curve(), Curve()

    def plain(self, work: StepWork) -> float:
        """Predict a step of decodes without drafts."""
        return self._plain.seconds(work.tokens, self._cost.seconds(work))

    def with_drafts(self, work: StepWork, drafting: float = 0.0) -> float:
        """Predict a step with drafts; ``drafting`` is what their making takes by the cost table."""
        curve = self._with_drafts if self._with_drafts.is_known else self._plain
        return curve.seconds(work.tokens, self._cost.seconds(work) + drafting)

    def knows_plain(self, tokens: int) -> bool:
        """Whether steps of that many decodes were measured often enough."""
        return self._plain.num_measured(tokens) >= ENOUGH

    def knows_with_drafts(self, tokens: int) -> bool:
        """Whether steps with drafts of about that many tokens were measured often enough."""
        return self._with_drafts.num_measured(tokens) >= ENOUGH

    def learn(self, work: StepWork, drafting: float, seconds: float, has_drafts: bool) -> None:
        """Take note of what a step took."""
        predicted = self._cost.seconds(work) + drafting
        if predicted > 0 and seconds > 0:
            (self._with_drafts if has_drafts else self._plain).learn(work.tokens, predicted, seconds)


def _size_of(tokens: int) -> int:
    return int(2 * math.log2(tokens) + 1e-9)


def _slope(points: list[_Point]) -> float:
    """Return how seconds grow with predicted ones, by a straight line; one point's ratio at most, and not below 0."""
    mean = sum(point.predicted for point in points) / len(points)
    spread = sum((point.predicted - mean) ** 2 for point in points)
    highest = points[-1].ratio
    if spread <= (0.01 * mean) ** 2:
        return highest
    growth = sum((point.predicted - mean) * point.ratio * point.predicted for point in points) / spread
    return min(max(growth, 0.0), highest)
