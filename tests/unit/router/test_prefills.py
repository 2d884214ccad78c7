# What a replica has to compute, and how fast it does.

from __future__ import annotations

import pytest

from router.replicas import LEAST_MEASURED, Prefills

LONG = 4 * LEAST_MEASURED


def test_a_prompt_is_to_be_computed_until_its_first_token() -> None:
    """Or until its call is there no more; it runs to the end of its reply. Each end counts once."""
    prefills = Prefills()
    first, second = prefills.begin(1000, 300, 0.0), prefills.begin(500, 500, 1.0)
    begun = prefills.uncached, prefills.running
    expected = first.expected_hit, second.expected_hit
    prefills.note_first_token(first, 2.0)
    after_token = prefills.uncached, prefills.running
    for _ in range(2):
        prefills.end(second)
        prefills.end(first)

    assert (begun, after_token) == ((800, 1500), (500, 1500))
    assert expected == pytest.approx((0.7, 0.0))
    assert (prefills.uncached, prefills.running) == (0, 0)


def test_the_rate_is_the_best_of_late() -> None:
    """What was ahead of a prompt when it came counts, too; a slower measurement lowers it by little, a short one, in
    which the way would count, not at all."""
    prefills = Prefills()
    both = [prefills.begin(LONG, LONG, 0.0) for _ in range(2)]
    prefills.note_first_token(both[1], 2.0)
    best = prefills.rate
    prefills.note_first_token(both[0], 2.0)
    slower = prefills.rate
    prefills.note_first_token(prefills.begin(100, 100, 3.0), 4.0)

    assert best == LONG
    assert 0.98 * best <= slower < best
    assert prefills.rate == slower
