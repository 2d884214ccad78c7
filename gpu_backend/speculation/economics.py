# Whether draft tokens pay, and how many: a draft is worth its chance to hold, and takes what the step grows by it, as
# steps of its kind were measured. An account bounds what finding out costs, whatever is wrong about both. Pure: a test
# may feed a virtual clock's seconds.

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpu_backend.step.cost import StepCost, StepWork, plan_work
from gpu_backend.step.plan import SequenceStep, StepPlan

MEASURED_EVERY = 16  # steps without drafts; their times are known, but may change
RETRIED_EVERY = 128  # steps, whatever was found to take too long
REST = 32  # steps with drafts, after which one without says what they save
LEAST_GAIN = 0.1  # tokens that a draft must be good for, even where the step takes no longer for it
TO_BEGIN = 1.2  # times the tokens that its time would have made: what drafting must promise while there is none
ALLOWANCE = 0.02  # of the time: what learning whether drafts pay may cost in the long run
MOST = 3.0  # steps that may be lost at once, while nothing is known yet
REMEMBERED = 5  # steps of about one size
ENOUGH = 2  # of them, to be trusted: the first may have been held up, or have captured a graph


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
        return times.plain.seconds(self.base) if self.is_decodes_alone else times.with_drafts.seconds(self.work)


@dataclass(frozen=True, slots=True)
class _Planned:
    """A step that was planned, until its result is known."""

    frame: StepFrame
    work: StepWork  # drafts included
    drafting: float = 0.0  # what making them takes by the cost table
    has_drafts: bool = False
    is_clean: bool = True  # nothing else is computed in it, so that its time says something about others


class DraftEconomics:
    """Decides in which steps drafts are made, and how many; learns from what steps took and gained.

    ``cost`` is where it starts. A sequence gets ``most`` drafts in a step at the most, and a pass of the draft model
    takes ``draft_share`` of a step; ``stretch`` is how much longer than its decodes alone a step may get for what
    others gain.
    """

    def __init__(self, cost: StepCost, stretch: float, most: int, draft_share: float) -> None:
        self.is_forced = False  # draft whether it pays or not: for measurements
        self._times = StepTimes(cost)
        self._account = DraftAccount()
        self._cost = cost
        self._stretch = stretch
        self._most = most
        self._draft_share = draft_share
        self._is_on = False
        self._may_pay = True
        self._with_drafts = 0  # steps in a row
        self._planned: dict[int, _Planned] = {}  # by the plan's number

    def frame(self, steps: Sequence[SequenceStep], decodes: Sequence[SequenceStep]) -> StepFrame:
        """Return a step as it stands, of which some are ``decodes``."""
        base = plan_work(decodes)
        work = base if len(decodes) == len(steps) else plan_work(steps)
        return StepFrame(base, work, self._draft_share * self._cost.seconds(base))

    def could_pay_in(self, number: int) -> bool:
        """Whether drafts may be made in the step of that number, as it looked in the last."""
        return self.is_forced or self._may_pay or number % RETRIED_EVERY == 0

    def may_draft(self, frame: StepFrame, number: int, left: int) -> bool:
        """Whether this step, with room for so many tokens more, is one for drafts: by what steps take, and what was
        lost by drafts lately.
        """
        self._may_pay = left > 0 and (self.is_forced or self._can_afford(frame, number))
        return self._may_pay

    def choose(self, frame: StepFrame, offers: list[Offer], most: int, number: int, is_alone: bool) -> list[int]:
        """Return how many drafts of each offer the step takes in."""
        if self.is_forced:
            return first_come(offers, most)
        # A step of one reply alone keeps no other waiting, however long it gets by drafts that pay.
        stretch = math.inf if is_alone else self._stretch
        lengths = best_lengths(self._times, frame, offers, most, stretch, self._is_on)
        if not any(lengths) and self._account.balance >= 1:
            trial = trial_lengths(self._times, frame, offers, most, stretch)
            if number % RETRIED_EVERY == 0 or not self._times.with_drafts.knows(frame.work.tokens + sum(trial)):
                return trial
        return lengths

    def note_without(self, frame: StepFrame, number: int) -> None:
        """Take note of a plan without drafts."""
        is_wanted = number % MEASURED_EVERY == 0 or self._with_drafts or not self._times.plain.knows(frame.base.tokens)
        self._is_on, self._with_drafts = False, 0
        if frame.is_decodes_alone and is_wanted:
            self._planned[number] = _Planned(frame, frame.base)

    def note_with(self, frame: StepFrame, number: int, steps: Sequence[SequenceStep], drafts: bool) -> None:
        """Take note of a plan for which the draft model or the device does something; ``drafts``: that makes any."""
        self._is_on = drafts
        self._with_drafts += 1
        drafted = sum(step.num_to_draft for step in steps)
        work = plan_work(steps) + StepWork(drafted, drafted, drafted * (frame.base.pairs // frame.base.tokens))
        drafting = max(step.num_to_draft for step in steps) * frame.drafting
        catches_up = any(len(step.draft_ids) > self._most + 1 for step in steps)
        is_clean = frame.is_decodes_alone and not catches_up
        self._planned[number] = _Planned(frame, work, drafting, has_drafts=True, is_clean=is_clean)

    def note_result(self, plan: StepPlan, num_gained: int, seconds: float) -> None:
        """Take note of what a step took, and how many tokens more than its decodes it gained by drafts."""
        planned = self._planned.pop(plan.step, None)
        self._planned = {number: other for number, other in self._planned.items() if number > plan.step}
        if planned is None or plan.copies:
            return
        times, frame = self._times, planned.frame
        if planned.is_clean:
            (times.with_drafts if planned.has_drafts else times.plain).learn(planned.work, planned.drafting, seconds)
        if planned.has_drafts:
            extra = times.with_drafts.seconds(planned.work, planned.drafting) - frame.seconds(times)
            self._account.book(num_gained / frame.base.tokens - extra / times.plain.seconds(frame.base))

    def most_catching_up(self, frame: StepFrame, left: int, block_size: int) -> int:
        """Return how many tokens the draft model may compute to catch up; at least a block's worth.

        By the cost table: more would stretch others' steps more than prompts may.
        """
        base = frame.base + StepWork(prompts=frame.work.prompts)
        seconds = max(0.0, self._stretch * self._cost.seconds(base) - self._cost.seconds(frame.work))
        token = self._draft_share * self._cost.token
        fitting = int(seconds / token) if token * left > seconds else left
        return min(left, max(fitting, block_size))

    def _can_afford(self, frame: StepFrame, number: int) -> bool:
        self._account.earn()
        knows = self._times.plain.knows(frame.base.tokens)
        if self._account.is_overdrawn or not knows or self._with_drafts >= REST:
            return False
        return number % RETRIED_EVERY == 0 or could_pay(self._times, frame, self._most)


def could_pay(times: StepTimes, frame: StepFrame, most: int) -> bool:
    """Whether drafts that are sure to hold, one or ``most`` for each decode, would be worth their time."""
    base = frame.base
    now, rate = frame.seconds(times), base.tokens / times.plain.seconds(base)
    for depth in (1, most):
        drafts = StepWork(depth * base.tokens, depth * base.tokens, depth * base.pairs)
        extra = times.with_drafts.seconds(frame.work + drafts, depth * frame.drafting) - now
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
    now, alone = frame.seconds(times), times.plain.seconds(base)
    limit = max(now, stretch * alone)
    may_pass = frame.is_decodes_alone and len(offers) == base.tokens
    rate = base.tokens / alone
    short = long = (0, rate, now)  # how many drafts, tokens a second, seconds
    gain, deepest = 0.0, 0
    for taken, (chance, depth, index) in enumerate(chances[:most_tokens], 1):
        work += StepWork(1, 1, offers[index].step.start + depth + 2)
        deepest = max(deepest, depth + 1)
        seconds = times.with_drafts.seconds(work, deepest * frame.drafting)
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
        if _all_keep_up(offers, lengths, long[2] / limit):
            return lengths
    return _lengths(chances, short[0], len(offers))


def trial_lengths(
    times: StepTimes, frame: StepFrame, offers: Sequence[Offer], most_tokens: int, stretch: float
) -> list[int]:
    """Say how many drafts of each offer find out what a step with drafts takes: all, if no reply waits for it.

    Else the first ones, as many as do not stretch the step.
    """
    limit = max(frame.seconds(times), stretch * times.plain.seconds(frame.base))
    wanted = [offer.length for offer in offers]
    deepest = max(wanted, default=0)
    work = frame.work + StepWork(sum(wanted), sum(wanted), sum(o.length * (o.step.start + 1) for o in offers))
    longer = times.with_drafts.seconds(work, deepest * frame.drafting) / limit
    is_for_all = frame.is_decodes_alone and len(offers) == frame.base.tokens
    if sum(wanted) > most_tokens or not (longer <= 1 or (is_for_all and _all_keep_up(offers, wanted, longer))):
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


def _all_keep_up(offers: Sequence[Offer], lengths: Sequence[int], longer: float) -> bool:
    """Whether each is expected to have as many tokens of a step ``longer`` times as long as of one without drafts."""
    return all(
        sum(offer.acceptance**depth for depth in range(length + 1)) >= longer
        for offer, length in zip(offers, lengths, strict=True)
    )


class DraftAccount:
    """What drafts have brought and cost so far, in steps without them.

    It opens with ``MOST`` steps, earns the allowance with every step, and is never above ``MOST``. Drafts are made
    while it is not overdrawn, and one step takes ``MOST`` from it at most. So n steps lose by drafts no more than
    ``ALLOWANCE`` * n + 2 * ``MOST`` of their time; profit is not counted beyond what fills it.
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


class StepTimes:
    """What steps of decodes take, without drafts and with them. As long as nothing is measured, ``cost`` alone tells:
    then its unit is no second. As long as none with drafts is, those without tell of them.

    A product with a vector is no product with a matrix, and a verification has graphs of its own: a line through both
    is wrong where it matters, so each kind has its own curve.
    """

    def __init__(self, cost: StepCost) -> None:
        self.plain = Curve(cost)
        self.with_drafts = Curve(cost, self.plain)


class _Point(NamedTuple):
    place: float  # log2 of the tokens
    ratio: float  # of the seconds to the prediction
    predicted: float


class Curve:
    """How measured seconds compare with what ``cost`` predicts, by the number of tokens; two sizes to each doubling.

    ``drafting`` is what the making of a step's drafts takes by the cost table. Until something is measured, ``other``
    tells.
    """

    def __init__(self, cost: StepCost, other: Curve | None = None) -> None:
        self._cost = cost
        self._other = other
        self._sizes: dict[int, deque[_Point]] = {}
        self._points: list[_Point] = []  # one for each size
        self._slope = 0.0  # seconds for each predicted one, beyond the largest size

    def learn(self, work: StepWork, drafting: float, seconds: float) -> None:
        """Take note of what a step took."""
        predicted = self._cost.seconds(work) + drafting
        if predicted <= 0 or seconds <= 0:
            return
        size = self._sizes.setdefault(_size_of(work.tokens), deque(maxlen=REMEMBERED))
        size.append(_Point(math.log2(work.tokens), seconds / predicted, predicted))
        trusted = [found for found in self._sizes.values() if len(found) >= ENOUGH] or self._sizes.values()
        # Whatever holds a step up makes it longer: of up to four the quickest counts, of five the second.
        undisturbed = (sorted(found, key=lambda point: point.ratio)[(len(found) - 1) // 4] for found in trusted)
        self._points = sorted(undisturbed)
        self._slope = _slope(self._points)

    def knows(self, tokens: int) -> bool:
        """Whether steps of about that many tokens were measured often enough."""
        return len(self._sizes.get(_size_of(tokens), ())) >= ENOUGH

    def seconds(self, work: StepWork, drafting: float = 0.0) -> float:
        """Predict a step: between measured sizes their ratios tell.

        Below the smallest its ratio tells; beyond the largest what they had in common. Without any: what is predicted.
        """
        points = self._points
        if not points and self._other is not None:
            return self._other.seconds(work, drafting)
        predicted = self._cost.seconds(work) + drafting
        if not points:
            return predicted
        place, last = math.log2(work.tokens), points[-1]
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
