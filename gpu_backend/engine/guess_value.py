# Whether guesses pay: the tokens that a step may gain by them against those that the engine would have made in the time
# that they take. Pure; the clock is a predicted one, so that a test counts steps, not seconds.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_backend.engine.cost import StepCost, StepWork
from gpu_backend.engine.plan import SequenceStep

LEAST_GAIN = 0.1  # tokens that a guess must be good for, even where the step takes no longer for it
TO_BEGIN = 1.2  # times the tokens that its time would have made: what guessing must promise while there is none


@dataclass(frozen=True, slots=True)
class Offer:
    """Guesses for one sequence's next tokens; ``acceptance`` is the chance that one holds if those before it did.

    Without ``guesses`` the draft model makes them, within the step.
    """

    step: SequenceStep
    length: int
    acceptance: float
    guesses: tuple[int, ...] = ()


def could_pay(cost: StepCost, base: StepWork, work: StepWork, pass_seconds: float = 0.0) -> bool:
    """Whether guesses that are sure to hold, one for each decode, would be worth their time.

    ``base`` is the work of the decodes alone; ``pass_seconds`` is what it takes to make the guesses.
    """
    extra = cost.seconds(work + StepWork(1, 1, base.pairs // base.tokens)) - cost.seconds(work)
    return extra * base.tokens + pass_seconds < cost.seconds(base)


def best_lengths(
    cost: StepCost,
    base: StepWork,
    work: StepWork,
    offers: Sequence[Offer],
    most_tokens: int,
    most_seconds: float,
    is_on: bool,
    pass_seconds: float = 0.0,
) -> list[int]:
    """Say how many guesses of each offer a step with ``work`` takes in, so that tokens come fastest.

    The likeliest guesses go first: each is worth its chance to hold, which is the product of the chances up to it. The
    step has at most ``most_tokens`` guesses and takes at most ``most_seconds``. Unless ``is_on``, guessing begins only
    where it gains clearly. Making the guesses takes ``pass_seconds`` for each depth, all sequences together.
    """
    chances = [
        (-(offer.acceptance ** (depth + 1)), depth, index)
        for index, offer in enumerate(offers)
        for depth in range(offer.length)
        if offer.acceptance ** (depth + 1) >= LEAST_GAIN
    ]
    chances.sort()
    now, alone = cost.seconds(work), cost.seconds(base)
    rate = base.tokens / alone
    best, best_rate = 0, rate
    gain, deepest = 0.0, 0
    for taken, (chance, depth, index) in enumerate(chances[:most_tokens], 1):
        context = offers[index].step.start + depth + 2
        work += StepWork(1, 1, context)
        deepest = max(deepest, depth + 1)
        seconds = cost.seconds(work) + deepest * pass_seconds
        if seconds > most_seconds:
            break
        gain -= chance
        extra = seconds - now
        faster = (base.tokens + gain) / (alone + extra)
        if faster > best_rate and (is_on or gain >= TO_BEGIN * extra * rate):
            best, best_rate = taken, faster
    lengths = [0] * len(offers)
    for _, _, index in chances[:best]:
        lengths[index] += 1
    return lengths
