# What measured outcomes say of a route's scores: the curve that a team really has, and the quality at which the chance
# that it asks for is kept. Pure numbers in, numbers out.

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

PRIOR = 1.0  # standard deviation, in logits, of what is believed of a shift before anything is measured
NEWTON_STEPS = 50
EDGE = 1e-6  # scores are kept this far from 0 and 1
LEAST_OUTCOMES = 100  # that a recalibration rests on
SURE = 1.96  # standard deviations of a 95 % interval


class Outcome(Struct, frozen=True):
    """One request that a small model answered, and what asking a large one showed."""

    score: float  # the probability, as it was said, that the small one suffices
    suffices: bool  # that it did
    small_nanousd: int
    large_nanousd: int


class Shift(Struct, frozen=True):
    """By how much scores are too low, in logits: one number, so that few outcomes can tell it and the order stays."""

    value: float
    error: float  # standard

    def threshold(self, quality: float, by: float = 0.0) -> float:
        """Return the score at which the measured chance is ``quality``; ``by`` standard errors further up."""
        if not 0 < quality < 1:
            return quality
        return _sigmoid(_logit(quality) - self.value + by * self.error)


class Point(Struct, frozen=True):
    """What a quality would have made of the requests that were measured."""

    quality: float
    small: int  # how many would have stayed with the small models
    share_large: float
    suffices: float | None  # of those that stayed: the share that was as good; None where none stayed
    low: float | None  # its 95 % interval
    high: float | None
    nanousd: float  # a request, on average


def shift_of(outcomes: Sequence[Outcome]) -> Shift:
    """Return the most probable shift under a normal prior about 0: without outcomes there is none."""
    logits = [_logit(one.score) for one in outcomes]
    found = sum(one.suffices for one in outcomes)
    value = 0.0
    curvature = 1 / PRIOR**2
    for _ in range(NEWTON_STEPS):
        chances = [_sigmoid(logit + value) for logit in logits]
        slope = found - sum(chances) - value / PRIOR**2
        curvature = sum(chance * (1 - chance) for chance in chances) + 1 / PRIOR**2
        step = slope / curvature
        value += max(-1.0, min(1.0, step))
        if abs(step) < 1e-9:
            break
    return Shift(value, 1 / math.sqrt(curvature))


def recalibrated(outcomes: Sequence[Outcome], quality: float, applied: float | None) -> float | None:
    """Return the score to ask for so that the measured chance is ``quality``; None while too little was measured.

    ``applied`` is what is asked for now, if anything: it stays while it is within a standard error of what was
    measured, so that chance alone moves nothing. Below the scores that were measured nobody goes: a step down brings
    new outcomes, and they the next step.
    """
    if len(outcomes) < LEAST_OUTCOMES:
        return None
    shift = shift_of(outcomes)
    if applied is not None and shift.threshold(quality, -1) <= applied <= shift.threshold(quality, 1):
        return applied
    return max(shift.threshold(quality), min(quality, *(one.score for one in outcomes)))


def curve_of(outcomes: Sequence[Outcome], qualities: Sequence[float]) -> list[Point]:
    """Return a point for each quality. The large model's price is that of the tier in which it was asked."""
    return [_point(outcomes, quality) for quality in qualities]


def interval_of(found: int, of: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927), which holds for few and for shares near 0 and 1."""
    share, square = found / of, SURE**2 / of
    middle = (share + square / 2) / (1 + square)
    half = SURE * math.sqrt(share * (1 - share) / of + square / (4 * of)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


def _point(outcomes: Sequence[Outcome], quality: float) -> Point:
    small = [one for one in outcomes if one.score >= quality]
    large = [one for one in outcomes if one.score < quality]
    found = sum(one.suffices for one in small)
    low, high = interval_of(found, len(small)) if small else (None, None)
    spent = sum(one.small_nanousd for one in small) + sum(one.large_nanousd for one in large)
    return Point(
        quality=quality,
        small=len(small),
        share_large=len(large) / max(1, len(outcomes)),
        suffices=found / len(small) if small else None,
        low=low,
        high=high,
        nanousd=spent / max(1, len(outcomes)),
    )


def _logit(chance: float) -> float:
    chance = min(1 - EDGE, max(EDGE, chance))
    return math.log(chance / (1 - chance))


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
