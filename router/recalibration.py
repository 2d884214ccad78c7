# What comparisons say of a route's scores: the curve that a team really has, and the quality at which the chance
# that it asks for is kept. Pure numbers in, numbers out.

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from msgspec import Struct

PRIOR = 0.5  # standard deviation, in logits, of what is believed of a shift before anything is measured
IMAGINED = 8.0  # comparisons at each hundredth of score, which go as believed
HUNDREDTHS = tuple((place + 0.5) / 100 for place in range(100))
NEWTON_STEPS = 50
EDGE = 1e-6  # scores are kept this far from 0 and 1
LEAST_COMPARISONS = 100  # that a recalibration rests on
SURE = 1.96  # standard deviations of a 95 % interval


class Comparison(Struct, frozen=True):
    """One request that a small and a large model answered, one of them in a shadow call, and what comparing them
    showed."""

    score: float  # the probability, as it was said, that the small one suffices
    suffices: bool  # that it did
    small_nanousd: int
    large_nanousd: int
    is_explored: bool = False  # the large one answered the caller
    form: bytes | None = None  # the text statistics that the score rests on, as ``learning.packed_form`` has them


class CurveStep(Struct, frozen=True):
    """Scores from ``least`` up to the next step, which suffice equally often."""

    least: float
    chance: float  # that a small model suffices
    error: float  # of it, standard


class Calibration(Struct, frozen=True):
    """The chance that scores really have, as steps that rise with the score."""

    steps: tuple[CurveStep, ...]

    def chance(self, score: float) -> float:
        """Return how likely a small model suffices where this score was said."""
        return self.steps[max(0, bisect_right(self.steps, score, key=lambda step: step.least) - 1)].chance

    def threshold(self, quality: float, by: float = 0.0) -> float:
        """Return the score from which on the chance is ``quality`` or more, less ``by`` standard errors; 1 if none."""
        if not 0 < quality < 1:
            return quality
        found = 1.0
        for step in reversed(self.steps):
            if step.chance - by * step.error < quality:
                break
            found = step.least
        return found


class Point(Struct, frozen=True):
    """What a quality would have made of the requests that were measured."""

    quality: float
    small: int  # how many would have stayed with the small models
    share_large: float
    suffices: float | None  # of those that stayed: the share that was as good; None where none stayed
    low: float | None  # its 95 % interval
    high: float | None
    nanousd: float  # a request, on average


def calibration_of(comparisons: Sequence[Comparison]) -> Calibration:
    """Return the rising steps that fit best (isotonic regression) to what was found and to what is believed before.

    Believed are the scores, all too low or too high by as much as was found: ``IMAGINED`` comparisons at each hundredth
    that agree with it. So few comparisons change little, and where nothing was measured the scores hold.
    """
    shift = _shift_of(comparisons)
    points = {score: (IMAGINED * _sigmoid(_logit(score) + shift), IMAGINED) for score in HUNDREDTHS}
    for one in comparisons:
        found, weight = points.get(one.score, (0.0, 0.0))
        points[one.score] = found + one.suffices, weight + 1
    steps: list[tuple[float, float, float]] = []  # least score, what was found and of how many
    for least, (found, weight) in sorted(points.items()):
        while steps and steps[-1][1] * weight >= found * steps[-1][2]:  # no step down: the two are one
            least, before, of = steps.pop()
            found, weight = found + before, weight + of
        steps.append((least, found, weight))
    chances = [(least, found / weight, weight) for least, found, weight in steps]
    return Calibration(tuple(CurveStep(least, p, math.sqrt(p * (1 - p) / weight)) for least, p, weight in chances))


def recalibrated(comparisons: Sequence[Comparison], quality: float, applied: float | None) -> float | None:
    """Return the score to ask for so that the measured chance is ``quality``; None while too little was measured.

    ``applied`` is what is asked for now, if anything: it stays while it is within a standard error of what was
    measured, so that chance alone moves nothing, and falls back to ``quality`` when what it rested on is forgotten. The
    score never goes below those that were measured: a step down brings new comparisons, and they the next step.
    """
    if len(comparisons) < LEAST_COMPARISONS:
        return None if applied is None else quality
    found = calibration_of(comparisons)
    if applied is not None and found.threshold(quality, -1) <= applied <= found.threshold(quality, 1):
        return applied
    return max(found.threshold(quality), min(quality, *(one.score for one in comparisons)))


def curve_of(comparisons: Sequence[Comparison], qualities: Sequence[float]) -> list[Point]:
    """Return a point for each quality. Each price is that of the tier in which the model was asked."""
    return [_point(comparisons, quality) for quality in qualities]


def interval_of(found: int, of: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927), which holds for few and for shares near 0 and 1."""
    share, square = found / of, SURE**2 / of
    middle = (share + square / 2) / (1 + square)
    half = SURE * math.sqrt(share * (1 - share) / of + square / (4 * of)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


def _shift_of(comparisons: Sequence[Comparison]) -> float:
    """Return by how much scores are too low, in logits: the most probable under a normal prior about 0."""
    logits = [_logit(one.score) for one in comparisons]
    found = sum(one.suffices for one in comparisons)
    value = 0.0
    for _ in range(NEWTON_STEPS):
        chances = [_sigmoid(logit + value) for logit in logits]
        slope = found - sum(chances) - value / PRIOR**2
        step = slope / (sum(chance * (1 - chance) for chance in chances) + 1 / PRIOR**2)
        value += max(-1.0, min(1.0, step))
        if abs(step) < 1e-9:
            break
    return value


def _point(comparisons: Sequence[Comparison], quality: float) -> Point:
    small = [one for one in comparisons if one.score >= quality]
    large = [one for one in comparisons if one.score < quality]
    found = sum(one.suffices for one in small)
    low, high = interval_of(found, len(small)) if small else (None, None)
    spent = sum(one.small_nanousd for one in small) + sum(one.large_nanousd for one in large)
    return Point(
        quality=quality,
        small=len(small),
        share_large=len(large) / max(1, len(comparisons)),
        suffices=found / len(small) if small else None,
        low=low,
        high=high,
        nanousd=spent / max(1, len(comparisons)),
    )


def _logit(chance: float) -> float:
    chance = min(1 - EDGE, max(EDGE, chance))
    return math.log(chance / (1 - chance))


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
