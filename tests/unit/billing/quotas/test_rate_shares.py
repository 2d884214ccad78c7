# What processes may admit while Redis is away: all shares together stay within a cap, whatever each process knows.

from __future__ import annotations

import pytest

from billing.quotas.rate_shares import BUCKETS, NONE, ScopeTold, Share

MINUTE = 60.0


def admitted(share: Share, owners: int, seconds: float, *, tokens: int = 0, start: float = 0.0) -> list[float]:
    """Try in every bucket as often as there is room; return when calls were admitted."""
    moments = []
    for step in range(int(seconds * BUCKETS)):
        now = start + step / BUCKETS
        bucket = int(now * BUCKETS)
        while share.refuses(now, bucket, tokens, 0, owners) is None:
            share.spend(bucket, 1, tokens)
            moments.append(now)
    return moments


def most_in_a_minute(moments: list[float]) -> int:
    """Return the most calls that any sixty seconds have seen."""
    return max(sum(begin <= moment < begin + MINUTE for moment in moments) for begin in moments)


def test_no_minute_of_an_outage_passes_the_cap() -> None:
    """Three processes that knew of an idle scope: ten calls a minute each, and those are given, minute after minute."""
    moments = [
        moment
        for _ in range(3)
        for moment in admitted(Share((30, NONE, NONE), ScopeTold(), 0.0, used=None, live=0), 3, 300)
    ]

    assert most_in_a_minute(moments) == 30
    assert len(moments) == 30 * 5


def test_a_full_minute_refills() -> None:
    """Nothing was left when Redis was last heard: half a minute later half of a share is there."""
    share = Share((60, NONE, NONE), ScopeTold(requests=60), 0.0, used=None, live=0)

    moments = admitted(share, 3, 30.3)

    assert len(moments) == 10
    assert moments[0] == 3.0  # a call's share of the refill: 60 s * 3 / 60


def test_tokens_are_shared_likewise_and_come_back_with_a_settlement() -> None:
    """What a call did not use of its tokens may be used by the next."""
    share = Share((NONE, 3000, NONE), ScopeTold(), 0.0, used=None, live=0)
    share.spend(0, 1, 900)
    refused = share.refuses(0.0, 0, 200, 0, 3)
    share.spend(0, 0, -500)

    assert refused is not None and refused[0] == 1 and 0 < refused[1] <= MINUTE
    assert share.refuses(0.0, 0, 200, 0, 3) is None


@pytest.mark.parametrize(("used", "first"), [(None, None), (40, 70.25)])
def test_a_small_cap_stays_with_the_process_that_had_it(used: int | None, first: float | None) -> None:
    """Two a minute, five processes: one at most, where it was used in the minute before, when that is over."""
    share = Share((2, NONE, NONE), ScopeTold(requests=1), 10.0, used=used, live=0)

    moments = admitted(share, 5, 180, start=11.0)

    assert moments[:1] == ([] if first is None else [first])
    assert first is None or most_in_a_minute(moments) == 1


@pytest.mark.parametrize(
    ("cap", "others", "own", "fits"), [(10, 0, 0, 5), (10, 8, 0, 2), (10, 0, 6, 0), (1, 0, 0, 0), (1, 0, 1, 0)]
)
def test_slots_leave_room_for_calls_of_others(cap: int, others: int, own: int, fits: int) -> None:
    """A share of the cap, less when others were heard to run more; calls that run already count."""
    share = Share((NONE, NONE, cap), ScopeTold(slots=others + own), 0.0, used=None, live=own)
    live = own
    while share.refuses(1.0, 4, 0, live, 2) is None:
        live += 1

    assert live - own == fits


def test_the_only_slot_goes_on_at_its_process() -> None:
    """One call at a time, two processes: the one whose call ran may run the next."""
    share = Share((NONE, NONE, 1), ScopeTold(slots=1), 0.0, used=None, live=1)

    assert share.refuses(100.0, 400, 0, 0, 2) is None
    assert share.refuses(100.0, 400, 0, 1, 2) is not None
