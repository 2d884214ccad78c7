# All orders, where the simulation throws dice.

from __future__ import annotations

import pytest

from tests.simulation.search import Search


@pytest.mark.parametrize(("calls", "faults"), [pytest.param(3, 0, marks=pytest.mark.soak), (2, 1)])
def test_the_invariants_hold_in_every_order(calls: int, faults: int) -> None:
    """Two owners in two scopes: whatever comes first, late, twice or never."""
    assert Search(calls=calls, faults=faults).run() > 5_000
