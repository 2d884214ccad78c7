# Which replica of our own engine a call goes to: the one that has probably computed its beginning before, unless that
# runs more than its part. Rendezvous hashing (Thaler and Ravishankar, IEEE/ACM ToN 6(1), 1998), so that a replica that
# goes moves no other replica's calls, with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA 2018).

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from router.cached_prompts import Found
from router.catalog.targets import Target

MOST_LOAD = 1.25  # of the mean, beyond which a replica is passed by
STICKY = 0.8  # of a prompt: with so much of it cached at a replica it stays there until that is saturated
PENALTY = 1.0  # seconds to the first token that staying may cost
# Of a byte to compute: what one costs that is read again at each of some ten steps, while others are computed.
RUNNING = 1 / 64
LEAST_MEASURED = 16_384  # bytes to compute, below which the way to the replica would count for the computing
FADES = 0.02  # of its distance to a slower measurement, that the rate falls by: the peak counts, and is not for ever


class VersionShare(NamedTuple):
    """Replicas of a pool's new version, and which share of conversations they answer."""

    share: float
    addresses: frozenset[str]


def by_version(replicas: Sequence[Target], new: VersionShare, draw: float) -> list[list[Target]]:
    """Return the replicas of the version that a conversation belongs to, then the others, for when those are taken.

    ``draw`` is a conversation's own, in [0, 1): while the share rises, each moves to the new version once.
    """
    there = [replica for replica in replicas if replica.endpoint.base_url in new.addresses]
    here = [replica for replica in replicas if replica.endpoint.base_url not in new.addresses]
    return [part for part in ((there, here) if draw < new.share else (here, there)) if part]


def by_beginning(replicas: Sequence[Target], beginning: str, loads: Sequence[int]) -> list[Target]:
    """Return the replicas in the order in which a call with this beginning is to try them.

    ``loads`` are the calls that run at each. Equal beginnings have one order, at any gateway; replicas at their bound
    stand behind all others, the least loaded first.
    """
    bound = math.ceil(MOST_LOAD * (sum(loads) + 1) / len(replicas))
    whose = blake2b(beginning.encode("utf-8", "replace"), digest_size=16).digest()
    ranked = [
        (load if load >= bound else 0, _rank(whose, replica), replica)
        for replica, load in zip(replicas, loads, strict=True)
    ]
    return [replica for _, _, replica in sorted(ranked, key=lambda each: each[:2])]


@dataclass(slots=True, eq=False)
class Prefill:
    """One call's prompt at a replica."""

    size: int
    uncached: int  # to be computed there; 0 once its first token has come
    ahead: int  # that was to be computed there when it came, itself included
    since: float

    @property
    def expected_hit(self) -> float:
        """The share of it that is cached there, as far as was known. Only before its first token."""
        return 1 - self.uncached / self.size if self.size else 0.0


class Prefills:
    """The prompts of the calls that are at one replica."""

    def __init__(self) -> None:
        self.running = 0  # bytes of them all,
        self.uncached = 0  # and those to be computed before first tokens come
        self.rate = 0.0  # bytes that it computes in a second at its best, as lately measured; 0: not known

    def begin(self, size: int, uncached: int, now: float) -> Prefill:
        """Note a call's prompt."""
        self.running += size
        self.uncached += uncached
        return Prefill(size, uncached, self.uncached, now)

    def note_first_token(self, prefill: Prefill, now: float) -> None:
        """Note that a prompt is computed. Twice is once."""
        if prefill.uncached and prefill.ahead >= LEAST_MEASURED and now > prefill.since:
            measured = prefill.ahead / (now - prefill.since)
            self.rate = max(measured, self.rate + FADES * (measured - self.rate))
        self._computed(prefill)

    def end(self, prefill: Prefill) -> None:
        """Note that a call is there no more, whether its first token came or not."""
        self._computed(prefill)
        self.running -= prefill.size
        prefill.size = 0

    def _computed(self, prefill: Prefill) -> None:
        self.uncached -= prefill.uncached
        prefill.uncached = 0


class Standing(NamedTuple):
    """What a gateway knows of a replica as it places a prompt. All in bytes of prompts."""

    found: Found  # of this one
    uncached: int  # of those on their way that are still to be computed there
    running: int = 0  # of those whose calls are there
    rate: float = 0.0  # that it computes in a second, as measured; 0: not known


def by_work(replicas: Sequence[Target], standings: Sequence[Standing], size: int) -> list[Target]:
    """Return the replicas in the order in which a prompt of ``size`` bytes is to try them: the one first that has it
    computed soonest; before it one that has nearly all of it cached and is not saturated, where it costs the fleet
    least."""
    ranked = [
        (
            one.found.worth < STICKY * size or one.uncached > PENALTY * one.rate,
            one.uncached + size - one.found.worth + RUNNING * one.running,
            place,
        )
        for place, one in enumerate(standings)
    ]
    return [replicas[place] for _, _, place in sorted(ranked)]


def _rank(whose: bytes, replica: Target) -> bytes:
    return blake2b(replica.endpoint.base_url.encode(), key=whose, digest_size=8).digest()
