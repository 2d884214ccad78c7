# Whether drafts pay: the tokens that a step may gain by them against those that the engine would have made in the time
# that they take. Pure; what steps take is measured by ``StepTimes``, which a test may feed a virtual clock's seconds.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_backend.speculation.step_times import StepTimes
from gpu_backend.step.cost import StepWork
from gpu_backend.step.plan import SequenceStep

LEAST_GAIN = 0.1  # tokens that a draft must be good for, even where the step takes no longer for it
TO_BEGIN = 1.2  # times the tokens that its time would have made: what drafting must promise while there is none


@dataclass(frozen=True, slots=True)
class Offer:
    """Drafts for one sequence's next tokens; ``acceptance`` is the chance that one holds if those before it did.

    Without ``drafts`` the draft model makes them, within the step, or the device, from the text that it has.
    """

    step: SequenceStep
    length: int
    acceptance: float
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepFrame:
    """A step as it stands without drafts: ``base`` is the work of its decodes, ``work`` all of it.

    ``drafting`` is what the cost table predicts for one draft each by the draft model.
    """

    base: StepWork
    work: StepWork
    drafting: float = 0.0

    @property
    def is_decodes_alone(self) -> bool:
        """Whether no prompt is computed beside the decodes."""
        return self.work == self.base

    def seconds(self, times: StepTimes) -> float:
        """Predict the step without drafts."""
        return times.plain(self.base) if self.is_decodes_alone else times.with_drafts(self.work)


def could_pay(times: StepTimes, frame: StepFrame, most: int) -> bool:
    """Whether drafts that are sure to hold, one or ``most`` for each decode, would be worth their time."""
    base = frame.base
    now, rate = frame.seconds(times), base.tokens / times.plain(base)
    for depth in (1, most):
        drafts = StepWork(depth * base.tokens, depth * base.tokens, depth * base.pairs)
        extra = times.with_drafts(frame.work + drafts, depth * frame.drafting) - now
        if depth * base.tokens > extra * rate:
            return True
    return False


def best_lengths(
    times: StepTimes, frame: StepFrame, offers: Sequence[Offer], most_tokens: int, stretch: float, is_on: bool
) -> list[int]:
    """Say how many drafts of each offer a step takes in, so that tokens come fastest.

    The likeliest drafts go first: each is worth its chance to hold, which is the product of the chances up to it. The
    step has at most ``most_tokens`` drafts. No reply's tokens are expected to come more slowly than from steps
    ``stretch`` times as long as their decodes alone. Unless ``is_on``, drafting begins only where it pays clearly.
    """
    chances = [
        (-(offer.acceptance ** (depth + 1)), depth, index)
        for index, offer in enumerate(offers)
        for depth in range(offer.length)
        if offer.acceptance ** (depth + 1) >= LEAST_GAIN
    ]
    chances.sort()
    base, work = frame.base, frame.work
    now, alone = frame.seconds(times), times.plain(base)
    limit = max(now, stretch * alone)
    may_pass = frame.is_decodes_alone and len(offers) == base.tokens
    rate = base.tokens / alone
    short = long = (0, rate, now)  # how many drafts, tokens a second, seconds
    gain, deepest = 0.0, 0
    for taken, (chance, depth, index) in enumerate(chances[:most_tokens], 1):
        work += StepWork(1, 1, offers[index].step.start + depth + 2)
        deepest = max(deepest, depth + 1)
        seconds = times.with_drafts(work, deepest * frame.drafting)
        gain -= chance
        extra = seconds - now
        faster = (base.tokens + gain) / (alone + extra)
        if is_on or gain >= TO_BEGIN * extra * rate:
            if faster > long[1]:
                long = taken, faster, seconds
            if faster > short[1] and seconds <= limit:
                short = taken, faster, seconds
        if seconds > limit and not may_pass:
            break
    if long[0] > short[0] and may_pass:
        lengths = _lengths(chances, long[0], len(offers))
        if all_keep_up(offers, lengths, long[2] / limit):
            return lengths
    return _lengths(chances, short[0], len(offers))


def trial_lengths(
    times: StepTimes, frame: StepFrame, offers: Sequence[Offer], most_tokens: int, stretch: float
) -> list[int]:
    """Say how many drafts of each offer find out what a step with drafts takes: all, if no reply waits for it.

    Else the first ones, as many as do not stretch the step.
    """
    limit = max(frame.seconds(times), stretch * times.plain(frame.base))
    wanted = [offer.length for offer in offers]
    deepest = max(wanted, default=0)
    work = frame.work + StepWork(sum(wanted), sum(wanted), sum(o.length * (o.step.start + 1) for o in offers))
    longer = times.with_drafts(work, deepest * frame.drafting) / limit
    is_for_all = frame.is_decodes_alone and len(offers) == frame.base.tokens
    if sum(wanted) > most_tokens or not (longer <= 1 or (is_for_all and all_keep_up(offers, wanted, longer))):
        most_tokens = min(most_tokens, int(sum(wanted) / longer))
    return first_come(offers, most_tokens)


def first_come(offers: Sequence[Offer], most: int) -> list[int]:
    """Take all drafts that there is room for."""
    lengths = []
    for offer in offers:
        lengths.append(min(offer.length, most))
        most -= lengths[-1]
    return lengths


def _lengths(chances: Sequence[tuple[float, int, int]], taken: int, num_offers: int) -> list[int]:
    lengths = [0] * num_offers
    for _, _, index in chances[:taken]:
        lengths[index] += 1
    return lengths


def all_keep_up(offers: Sequence[Offer], lengths: Sequence[int], longer: float) -> bool:
    """Whether each is expected to have as many tokens of a step ``longer`` times as long as of one without drafts."""
    return all(
        sum(offer.acceptance**depth for depth in range(length + 1)) >= longer
        for offer, length in zip(offers, lengths, strict=True)
    )
