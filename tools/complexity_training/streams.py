# Held-out rows as a team's calls: drawn in an order, compared one after another, judged on the rows that were not.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from router.complexity.judging import Floats, HeldOut, apgr, calibration_error, calibration_noise
from router.learning import Bools, Learned, learn
from router.recalibration import Comparison, calibration_of
from tools.complexity_training.dataset import Outcomes

COUNTS = (0, 50, 100, 200, 300)  # comparisons of a set after which it is judged
JUDGED = 1_000  # rows of a set that judge, at most
LEFT_OUT = ("arc_challenge", "mbpp")  # domains whose outcomes are kept for others to judge by
BATCH = 50  # calls that are routed by what was learned before them
BELOW = 120  # rows to judge, below which a set is left out


class Work(Struct, frozen=True):
    """One kind of work of a team: prompts of one benchmark, as a pair of models did on them."""

    name: str
    scores: Floats  # of a model that saw neither benchmark nor prompts
    form: Floats  # (rows, text statistics)
    strong: Floats
    weak: Floats

    @property
    def suffices(self) -> Bools:
        found: Bools = self.weak >= self.strong
        return found

    def take(self, rows: np.ndarray) -> Work:
        """Return these rows."""
        return Work(self.name, self.scores[rows], self.form[rows], self.strong[rows], self.weak[rows])

    def split(self, count: int, dice: np.random.Generator) -> tuple[Work, Work]:
        """Return ``count`` rows at random, as they are asked, and others that judge."""
        order = dice.permutation(len(self.scores))
        return self.take(order[:count]), self.take(order[count:][:JUDGED])


class Judged(NamedTuple):
    """What scores are worth after some comparisons."""

    gain: float  # APGR, less that of the shipped scores
    error: float  # of calibration
    by_chance: float
    scores: Floats
    suffices: Bools


def works_of(held: Iterable[HeldOut], outcomes: Outcomes, least: int = COUNTS[-1] + BELOW) -> list[Work]:
    """Return a kind of work for each set and pair of models that has rows enough."""
    _, first = np.unique(np.array(outcomes.prompts), return_index=True)  # as ``HeldOut.prompt`` numbers them
    works = []
    for each in held:
        assert each.prompt is not None
        kept = ~np.isin(outcomes.domain[first[each.prompt]], LEFT_OUT)
        for pair in (rows[kept[rows]] for rows in each.by_pair):
            if len(pair) < least:
                continue
            name = each.name if len(each.by_pair) == 1 or each.pair is None else _named(each.name, each.pair[pair[0]])
            form = outcomes.stats[first[each.prompt[pair]]]
            works.append(Work(name, each.scores[pair], form, each.strong[pair], each.weak[pair]))
    return works


def _named(name: str, pair: str) -> str:
    """Return the name of a set and of a pair of models; panels by how many they are."""
    models = [model.removeprefix("mean of ").split(", ") for model in pair.split(" and ")]
    return f"{name}: " + ", ".join(each[0] if len(each) == 1 else f"{len(each)} models" for each in models)


def joined(works: Sequence[Work], name: str = "") -> Work:
    """Return the rows of all, one after another."""
    columns = zip(*((each.scores, each.form, each.strong, each.weak) for each in works), strict=True)
    return Work(name, *map(np.concatenate, columns))


def learned_from(asked: Work) -> Learned:
    """Return what comparing these calls teaches, the oldest first."""
    return learn(asked.scores, asked.form, asked.suffices)


def judged(scores: Floats, rest: Work) -> Judged:
    """Return what these scores of the rest are worth."""
    gain = apgr(scores, rest.strong, rest.weak) - apgr(rest.scores, rest.strong, rest.weak)
    error = calibration_error(scores, rest.suffices)
    return Judged(gain, error, calibration_noise(scores), scores, rest.suffices)


def after(past: Sequence[Work], rest: Work) -> Judged:
    """Return what is known of the rest after these comparisons."""
    asked = joined(past) if past else None
    if asked is None or not len(asked.scores):
        return judged(rest.scores, rest)
    return judged(learned_from(asked).chances(rest.scores, rest.form)[0], rest)


def recalibrated(asked: Work, rest: Work) -> Judged:
    """Return what the same comparisons make of the shipped score alone: rising steps, which rank nothing anew."""
    found = zip(asked.scores.tolist(), asked.suffices.tolist(), strict=True)
    steps = calibration_of([Comparison(score, suffices, 0, 0) for score, suffices in found])
    return judged(np.array([steps.chance(score) for score in rest.scores.tolist()]), rest)


def alone(work: Work, seed: int, counts: Sequence[int] = COUNTS) -> list[Judged]:
    """Return what a team that does this work only has after so many comparisons; last, of the score alone."""
    asked, rest = work.split(counts[-1], np.random.default_rng(seed))
    found = [after([asked.take(np.arange(count))], rest) for count in counts]
    return [*found, recalibrated(asked, rest)]


def drifting(works: Sequence[Work], seed: int | None, counts: Sequence[int] = COUNTS) -> list[list[Judged]]:
    """Return the same for a team whose work moves from one benchmark to the next: what it compared before stays.

    In the order given without a ``seed``, else in a random one; the last of each again of the score alone.
    """
    dice = np.random.default_rng(0 if seed is None else seed)
    past: list[Work] = []
    found = []
    for place in range(len(works)) if seed is None else dice.permutation(len(works)):
        asked, rest = works[place].split(counts[-1], dice)
        of_work = [after([*past, asked.take(np.arange(count))], rest) for count in counts]
        past.append(asked)
        found.append([*of_work, recalibrated(joined(past[-2:]), rest)])
    return found


def routed(works: Sequence[Work], seed: int, quality: float, *, explores: bool, draws: bool) -> tuple[float, float]:
    """Return what a call brings that is routed by what was learned, and the share that went to small models.

    A call that a small model answers brings 1 less the quality where it suffices, and loses the quality where not; one
    that goes to the large model brings nothing. ``explores``: every call is compared, else those of small models.
    ``draws``: Thompson's rule, by a chance drawn from what is believed, else by its mean. Works follow each other.
    """
    dice = np.random.default_rng(seed)
    past: list[Work] = []
    brought: list[Floats] = []
    small: list[Bools] = []
    for place in dice.permutation(len(works)):
        asked, _ = works[place].split(COUNTS[-1], dice)
        for start in range(0, COUNTS[-1], BATCH):
            calls = asked.take(np.arange(start, start + BATCH))
            chances = calls.scores
            if sum(len(one.scores) for one in past) >= BATCH:
                chances, spread = learned_from(joined(past)).chances(calls.scores, calls.form)
                if draws:
                    logit = np.log(chances / (1 - chances)) * np.sqrt(1 + np.pi * spread**2 / 8)
                    chances = 1 / (1 + np.exp(-(logit + spread * dice.normal(size=len(logit)))))
            is_small = chances >= quality
            brought.append(np.where(is_small, calls.suffices - quality, 0.0))
            small.append(is_small)
            past.append(calls if explores else calls.take(np.flatnonzero(is_small)))
    return float(np.concatenate(brought).mean()), float(np.concatenate(small).mean())
