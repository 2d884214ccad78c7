# How often a team may read, apart from its calls.

from __future__ import annotations

import pytest

from billing.core.errors import RateLimited
from gateway.overload.read_limit import ReadLimit, StoredLimit
from tests.support.clock import SetClock


@pytest.mark.parametrize(("kind", "at_once", "a_second"), [(ReadLimit, 20, 5), (StoredLimit, 200, 50)])
def test_a_team_reads_at_its_own_pace(kind: type[ReadLimit], at_once: int, a_second: int) -> None:
    """So many at once, then so many a second; other teams read on meanwhile."""
    clock = SetClock()
    limit = kind(clock.monotonic)

    def taken(most: int) -> int:
        for count in range(most):
            try:
                limit.take("a")
            except RateLimited as exc:
                assert exc.headers["retry-after"] == "1"
                return count
        return most

    burst = taken(1000)
    limit.take("b")
    clock.move(1)
    first = taken(1000)
    clock.move(3600)

    assert (burst, first, taken(1000)) == (at_once, a_second, at_once)
