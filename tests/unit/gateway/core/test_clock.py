# Ids are made by hand for speed; the standard library's reading of them is the judge.

from __future__ import annotations

from uuid import RFC_4122, UUID

from billing.core.ids import day_of
from tests.support.clock import SetClock


def test_an_id_is_a_uuid_of_version_7_that_tells_its_time() -> None:
    """Canonical text, version and variant of RFC 9562, and the moment in its first 48 bits; never the same twice."""
    clock = SetClock()
    ids = {clock.new_id() for _ in range(200)}
    read = [UUID(one) for one in ids]

    assert len(ids) == 200
    assert {str(one) for one in read} == ids
    assert {(one.version, one.variant) for one in read} == {(7, RFC_4122)}
    assert {one.int >> 80 for one in read} == {int(clock.now() * 1000)}
    assert {day_of(one) for one in ids} == {int(clock.now() // 86_400)}
