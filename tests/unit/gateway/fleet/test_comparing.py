# Whether a new version is judged worse: never for noise, always for what users would feel.

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable

import pytest

from billing.ledger.version_calls import CallsCell
from gateway.fleet.comparing import LEAST, Slice, slices_of, why_worse

SLOWDOWN, ERRORS = 1.3, 0.02  # as the defaults have it


class Traffic:
    """Calls of two versions as they come. First tokens: a lognormal whose quartiles are a factor of two apart."""

    def __init__(self, seed: int, share: float = 0.1, calls: int = 30) -> None:
        self.dice, self.share, self.calls = random.Random(seed), share, calls  # calls: of each slice
        self.cells: dict[tuple[int, int, bool], list[float]] = defaultdict(lambda: [0, 0, 0, 0.0, 0.0])
        self.at = 0

    def pass_slice(
        self, slower: float = 1.0, failing: float = 0.01, failing_before: float = 0.01, busy: float = 1.0
    ) -> Traffic:
        """Let a slice of time pass. ``busy``: times by which both are slower in it; long prompts are slower, too."""
        for _ in range(self.calls):
            is_new, size = self.dice.random() < self.share, self.dice.randint(2, 6)
            cell = self.cells[self.at, size, is_new]
            cell[0] += 1
            if self.dice.random() < (failing if is_new else failing_before):
                cell[1] += 1
                continue
            ms = 20 * 2**size * busy * self.dice.lognormvariate(0, 0.7) * (slower if is_new else 1.0)
            cell[2] += 1
            cell[3] += math.log(ms)
            cell[4] += math.log(ms) ** 2
        self.at += 1
        return self

    def slices(self) -> tuple[Slice, ...]:
        """Return what is compared."""
        return slices_of(
            CallsCell(at, size, is_new, int(calls), int(failed), int(timed), total, squares)
            for (at, size, is_new), (calls, failed, timed, total, squares) in self.cells.items()
        )

    def judged(self, step: Callable[[Traffic], Traffic], slices: int = 40) -> tuple[int, str] | None:
        """Judge after every fourth slice; return after how many new calls it was judged worse, and why."""
        for _ in range(slices // 4):
            for _ in range(4):
                step(self)
            seen = self.slices()
            if (why := why_worse(seen, SLOWDOWN, ERRORS)) is not None:
                return sum(one.calls for one in seen), why
        return None


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_noise_is_no_reason(share: float) -> None:
    """Of twenty rollouts that differ in nothing, each looked at ten times, none is judged worse."""
    found = [Traffic(seed, share).judged(lambda it: it.pass_slice()) for seed in range(10)]

    assert not any(found)


def test_what_befalls_both_is_no_reason() -> None:
    """Busy slices, and a version that got its share only when all was busy."""
    dice = random.Random(1)
    swings = Traffic(1).judged(lambda it: it.pass_slice(busy=dice.choice((1, 1, 5))))
    late = Traffic(2, share=0.0)
    for _ in range(20):
        late.pass_slice()
    late.share = 0.3
    only_when_busy = late.judged(lambda it: it.pass_slice(busy=4.0), slices=20)

    assert (swings, only_when_busy) == (None, None)


def test_a_version_twice_as_slow_is_found() -> None:
    """In each of ten rollouts, within a few hundred of its calls; and one a tenth slower is tolerated."""
    found = [Traffic(seed).judged(lambda it: it.pass_slice(slower=2.0), slices=150) for seed in range(10)]
    tenth = [Traffic(seed, 0.5).judged(lambda it: it.pass_slice(slower=1.1)) for seed in range(3)]

    assert all(one is not None and LEAST <= one[0] <= 400 and " times as long: " in one[1] for one in found)
    assert not any(tenth)


def test_a_version_that_fails_is_found() -> None:
    """One that fails each call at once, one that fails a tenth soon; what the one before fails as well, never."""
    all_of_it = Traffic(1).judged(lambda it: it.pass_slice(failing=1.0))
    tenth = Traffic(2).judged(lambda it: it.pass_slice(failing=0.1), slices=150)
    both = [
        Traffic(seed, 0.3).judged(lambda it: it.pass_slice(failing=0.1, failing_before=0.1), 40) for seed in range(4)
    ]

    assert all_of_it is not None and all_of_it[0] < 20 and "it failed " in all_of_it[1]
    assert tenth is not None and tenth[0] < 300 and "beside" in tenth[1]
    assert not any(both)


def test_a_single_slice_decides_nothing() -> None:
    """A burst of long prompts, or of one client's failures, that meets the one new replica, is no version's."""
    burst = Traffic(1, share=0.5, calls=200)
    burst.pass_slice(slower=6.0, failing=0.5)
    alone = why_worse(burst.slices(), SLOWDOWN, ERRORS)
    for _ in range(3):
        burst.pass_slice()
    among = why_worse(burst.slices(), SLOWDOWN, ERRORS)
    for _ in range(4):
        burst.pass_slice(slower=6.0)

    assert (alone, among) == (None, None)
    assert why_worse(burst.slices(), SLOWDOWN, ERRORS) is not None


def test_slices_with_one_version_tell_nothing() -> None:
    """They are not even kept."""
    assert slices_of([CallsCell(1, 3, True, 9, 9, 0, 0.0, 0.0)]) == ()
    assert why_worse((), SLOWDOWN, ERRORS) is None
