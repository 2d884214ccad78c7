# Replicas: a beginning has its own, the load is bounded, and whoever goes takes nobody else's place along.

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.cached_prompts import NOTHING_FOUND, Found
from router.catalog.targets import Endpoint, Target
from router.replicas import Standing, VersionShare, by_beginning, by_version, by_work
from tests.support.house import model

REPLICAS = [Target(model("m"), Endpoint("here", f"http://gpu-{number}:8100/v1")) for number in range(4)]
OPENINGS = [f"Which river flows through city {number}?" for number in range(1000)]


def home_of(beginning: str, replicas: list[Target] = REPLICAS) -> str:
    return by_beginning(replicas, beginning, [0] * len(replicas))[0].endpoint.base_url


def test_beginnings_have_homes_and_share_the_replicas() -> None:
    """The same one in whatever process, and however the replicas are ordered; and all of them are used."""
    homes = [home_of(opening) for opening in OPENINGS]

    assert homes == [home_of(opening, REPLICAS[::-1]) for opening in OPENINGS]
    assert all(200 < count < 300 for count in Counter(homes).values())
    assert home_of("Hello") == "http://gpu-0:8100/v1"


def test_a_replica_that_goes_moves_its_own_alone() -> None:
    """All others stay where they are cached."""
    stays = [replica for replica in REPLICAS if replica is not REPLICAS[1]]

    for opening in OPENINGS:
        if (home := home_of(opening)) != REPLICAS[1].endpoint.base_url:
            assert home_of(opening, stays) == home


@given(st.lists(st.integers(0, 3), min_size=1, max_size=300))
def test_no_load_passes_its_bound(openings: list[int]) -> None:
    """Even when all say the same: calls that come while others run never make more than a quarter beyond the mean."""
    loads = [0] * len(REPLICAS)
    for opening in openings:
        first = by_beginning(REPLICAS, str(opening), loads)[0]
        loads[REPLICAS.index(first)] += 1

        assert max(loads) <= -(-1.25 * sum(loads) // len(loads))


def test_when_all_are_loaded_the_least_loaded_leads() -> None:
    """What lies behind the bound stands by its load."""
    order = by_beginning(REPLICAS, "Hello", [9, 0, 30, 20])

    assert [REPLICAS.index(replica) for replica in order[-2:]] == [3, 2]
    assert set(order) == set(REPLICAS)


@given(st.floats(0, 1, exclude_max=True), st.lists(st.floats(0, 1), min_size=1, max_size=9), st.booleans())
def test_a_conversation_moves_to_a_new_version_once(draw: float, shares: list[float], falls: bool) -> None:
    """While the share rises; on the way back, while it falls, once too. Those of its version come first, then the
    others: none is left out."""
    new = frozenset(replica.endpoint.base_url for replica in REPLICAS[2:])
    at_new = []
    for share in sorted(shares, reverse=falls):
        parts = by_version(REPLICAS, VersionShare(share, new), draw)
        at_new.append(parts[0] == REPLICAS[2:])
        assert sorted(parts, key=lambda part: REPLICAS.index(part[0])) == [REPLICAS[:2], REPLICAS[2:]]

    assert at_new == sorted(at_new, reverse=falls)
    assert by_version(REPLICAS[2:], VersionShare(0.0, new), draw) == [REPLICAS[2:]]


IDLE = Standing(NOTHING_FOUND, 0, 0)


def placed(*standings: Standing, size: int = 8000) -> list[int]:
    return [REPLICAS.index(replica) for replica in by_work(REPLICAS[: len(standings)], standings, size)]


def test_a_prompt_goes_where_the_least_is_to_compute() -> None:
    """Cached beginnings and what waits there count in one measure, so a busy replica keeps only what is worth it."""
    cached = Found(6000, 6000.0)

    assert placed(IDLE, Standing(cached, 0, 0), IDLE) == [1, 0, 2]
    assert placed(IDLE, Standing(cached, 5000, 0), IDLE)[0] == 1
    assert placed(IDLE, Standing(cached, 7000, 0), IDLE)[0] == 0
    assert placed(Standing(Found(6000, 4500.0), 0, 0), Standing(cached, 0, 0))[0] == 1


def test_replicas_that_are_alike_keep_the_order_of_their_homes() -> None:
    """So that prompts which begin alike meet at one replica before it tells of them, at whichever gateway."""
    assert placed(IDLE, IDLE, IDLE, IDLE) == [0, 1, 2, 3]
