# Grants, returns, flushes, limits, corrections and ends of owners that meet in Postgres, two and three at a time,
# stopped at each lock. Whatever the order, what is there afterwards is what one after the other would have left: no cap
# is passed, no row counts twice, a balance has drawn what its leases have. And nothing ever locks up.

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from gateway.storage.database import Database
from tests.support.clock import SetClock
from tests.support.racing import STOPS, VERBS, Seat, Track, Verb, correct, flush, give_back, take

WHOLE = pytest.mark.soak
STEPS = 120  # of each of three, in the stress


def in_turns(other: str, one: object, two: object, every: int) -> pytest.MarkDecorator:
    """Have each verb go first, in a commit with one of two values of ``other`` by turns and ``every`` second verb that
    comes by, in a soak with both and all."""
    first = VERBS.index
    cases = [
        *(pytest.param(verb, (one, two)[first(verb) % 2], every, id=f"{verb!r}-some") for verb in VERBS),
        *(pytest.param(verb, value, 1, marks=WHOLE, id=f"{verb!r}-{value}") for verb in VERBS for value in (one, two)),
    ]
    return pytest.mark.parametrize(("first", other, "every"), cases)


@pytest.fixture
async def track(database: Database, clock: SetClock) -> AsyncIterator[Track]:
    """A prepared database with seats to race from."""
    track = Track(database, clock)
    await track.prepare()
    yield track
    await track.close()


@in_turns("state", "fresh", "used", every=6)
async def test_two_meet_at_a_lock(state: str, first: Verb, every: int, track: Track) -> None:
    """One is stopped at each of its rows, with what it has locked by then; another begins; then both go on."""
    ours, theirs, _ = track.seats
    passed = 0
    for turn, stop in enumerate(STOPS):
        for second in VERBS[turn % every :: every]:
            await track.restore(state)
            async with track.stop_at(stop):
                ours.say(first)
                if not await track.rest(ours):
                    await ours.end(commits=False)
                    break  # the first does not come by this row
                theirs.say(second)
                await track.rest(theirs)
            await _end_all(ours, theirs)

            await track.check(state, [first, second])
            passed += 1

    assert passed > 1


@in_turns("commits", True, False, every=3)
async def test_one_waits_for_another_that_is_open(first: Verb, commits: bool, every: int, track: Track) -> None:
    """One has said all and not committed yet; another begins; then the first commits, or takes it all back."""
    ours, theirs, _ = track.seats
    for second in VERBS[(VERBS.index(first) + commits) % every :: every]:
        await track.restore("used")
        ours.say(first)
        assert not await track.rest(ours)
        theirs.say(second)
        await track.rest(theirs)
        await _end_all(ours, theirs, commits=commits)

        await track.check("used", [first, second] if commits else [second])


@pytest.mark.parametrize("every", [12, pytest.param(1, marks=WHOLE)])
@pytest.mark.parametrize("first", VERBS, ids=repr)
async def test_three_meet(first: Verb, every: int, track: Track) -> None:
    """One is open, a second and a third begin in this order; then all go on."""
    for turn, second in enumerate(VERBS, VERBS.index(first)):
        for third in VERBS[turn % every :: every]:
            await track.restore("used")
            for seat, verb in zip(track.seats, (first, second, third), strict=True):
                seat.say(verb)
                await track.rest(seat)
            await _end_all(*track.seats)

            await track.check("used", [first, second, third])


async def test_random_verbs_from_three_sides(track: Track) -> None:
    """Hundreds of grants, returns, rows delivered twice and corrections at once: the books agree, no cap was passed."""
    dice = random.Random(7)
    owners = ("a", "b", "c")
    returned = dict.fromkeys(owners, 0)
    await track.restore("fresh")

    async def live(seat: Seat, owner: str) -> None:
        for _ in range(STEPS):
            returned[owner] += dice.choice((0, 5, 40))
            other = dice.choice(owners)
            verb = dice.choice(
                (
                    take(owner, dice.choice((1, 20, 90)), dice.choice((1, 3))),
                    give_back(owner, returned[owner]),
                    flush(dice.choice((owner, "")), other, dice.randrange(9)),
                    correct(-dice.randrange(3), -dice.randrange(3)),
                )
            )
            seat.say(verb)
            await seat.end()

    await asyncio.gather(*map(live, track.seats, owners))

    assert not await track.wrong()
    assert not await track.passed()
    _, leases, rows = await track.tables()
    spent = [lease[2] for key, lease in leases.items() if key[1:3] == ("team:team_a", "nanousd")]
    assert sum(spent) == 110 * len(rows) > 0


async def _end_all(*seats: Seat, commits: bool = True) -> None:
    first, *others = seats
    await asyncio.gather(first.end(commits=commits), *(seat.end() for seat in others))
