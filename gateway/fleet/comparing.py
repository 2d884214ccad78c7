# Whether a pool's new version is worse than the one before it, by calls of the same moments. Pure. Calls are compared
# within slices of time, and first tokens among prompts of like size: what a busy minute, or long prompts, do to both
# versions is not held against one. First tokens are compared by their logarithms, which are nearly normal.

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from msgspec import Struct

from billing.ledger.version_calls import CallsCell

LEAST = 20  # first tokens of either version, below which nothing is told of them
SURE = 3.0  # standard errors that a difference lies beyond what is tolerated


class Slice(Struct, frozen=True, array_like=True):
    """What the two versions did in a slice of time, or in several. Differences are of first tokens' logarithms."""

    calls: int = 0  # at the new version,
    failed: int = 0
    calls_before: int = 0  # and at the one before
    failed_before: int = 0
    timed: int = 0  # first tokens of the new version, among prompts of like size,
    timed_before: int = 0
    weighed: float = 0.0  # mean differences within a size, by their weights
    weight: float = 0.0
    squares: float = 0.0  # of what lies around the means
    freedom: int = 0  # degrees of it

    def plus(self, one: Slice, times: int) -> Slice:
        """Return the sums with those of one slice added; with ``times`` -1, taken away."""
        return Slice(*(getattr(self, name) + times * getattr(one, name) for name in self.__struct_fields__))


def slices_of(cells: Iterable[CallsCell]) -> tuple[Slice, ...]:
    """Return the slices in which both versions were asked, in their order."""
    by_time: dict[int, dict[int, dict[bool, CallsCell]]] = defaultdict(lambda: defaultdict(dict))
    for cell in cells:
        by_time[cell.slice][cell.size][cell.is_new] = cell
    found = (_slice_of(sizes.values()) for _, sizes in sorted(by_time.items()))
    return tuple(one for one in found if one.calls and one.calls_before)


def why_worse(slices: Sequence[Slice], most_slowdown: float, most_errors: float) -> str | None:
    """Return what the new version does worse; ``None``: nothing that is beyond chance and beyond what is tolerated.

    ``most_slowdown``: times the first-token times of the version before; ``most_errors``: how much larger the share of
    failed calls may be. What rests on a single slice alone is told of none.
    """
    totals = Slice()
    for one in slices:
        totals = totals.plus(one, 1)
    for judge, most in ((_why_slower, most_slowdown), (_why_failing, most_errors)):
        if (why := judge(totals, most)) and all(judge(totals.plus(one, -1), most) for one in slices):
            return why
    return None


def _slice_of(sizes: Iterable[dict[bool, CallsCell]]) -> Slice:
    calls = {True: [0, 0], False: [0, 0]}
    timed, before, weighed, weight, squares, freedom = 0, 0, 0.0, 0.0, 0.0, 0
    for cells in sizes:
        for is_new, cell in cells.items():
            calls[is_new][0] += cell.calls
            calls[is_new][1] += cell.failed
        new, old = cells.get(True), cells.get(False)
        if new is None or old is None or not new.timed or not old.timed:
            continue
        part = new.timed * old.timed / (new.timed + old.timed)
        weighed += part * (new.total / new.timed - old.total / old.timed)
        weight += part
        squares += sum(max(0.0, one.squares - one.total**2 / one.timed) for one in (new, old))
        freedom += new.timed + old.timed - 2
        timed, before = timed + new.timed, before + old.timed
    (count, failed), (count_before, failed_before) = calls[True], calls[False]
    return Slice(
        calls=count,
        failed=failed,
        calls_before=count_before,
        failed_before=failed_before,
        timed=timed,
        timed_before=before,
        weighed=weighed,
        weight=weight,
        squares=squares,
        freedom=freedom,
    )


def _why_slower(seen: Slice, most: float) -> str | None:
    if min(seen.timed, seen.timed_before, seen.freedom) < LEAST:
        return None
    mean = seen.weighed / seen.weight
    error = math.sqrt(seen.squares / seen.freedom / seen.weight)
    if mean - SURE * error <= math.log(most):
        return None
    counted = f"{seen.timed} calls beside {seen.timed_before} of the version before"
    return f"its first tokens take {math.exp(mean):.2g} times as long: {counted}"


def _why_failing(seen: Slice, most: float) -> str | None:
    """Judge by the interval of Newcombe (Statistics in Medicine 17, 1998, method 10) for a difference of shares."""
    if not seen.calls or not seen.calls_before or not seen.failed:
        return None
    share, before = seen.failed / seen.calls, seen.failed_before / seen.calls_before
    low = share - _wilson(seen.failed, seen.calls, -SURE)
    high = _wilson(seen.failed_before, seen.calls_before, SURE) - before
    if share - before - math.hypot(low, high) <= most:
        return None
    counted = f"{seen.failed_before} of {seen.calls_before} of the version before"
    return f"it failed {seen.failed} of {seen.calls} calls, as gateways saw it, beside {counted}"


def _wilson(count: int, of: int, sure: float) -> float:
    """Return an end of the interval of a share, the upper one where ``sure`` is positive."""
    share, square = count / of, sure * sure / of
    centre = share + square / 2
    return (centre + math.copysign(math.sqrt(share * (1 - share) * square + square * square / 4), sure)) / (1 + square)
