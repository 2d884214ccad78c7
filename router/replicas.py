# Which replica of our own engine a call goes to: the one that has probably computed its beginning before, unless that
# runs more than its part. Rendezvous hashing (Thaler and Ravishankar, IEEE/ACM ToN 6(1), 1998), so that a replica that
# goes moves no other replica's calls, with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA 2018). A replica
# whose first tokens come late, whatever it says of its load, has a smaller part.

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
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
SLOW = 3.0  # times its peers' first tokens: later than that, a replica has less than its part
MOST_LATE = math.log(16)  # that its first tokens count for at the most
AT_ONCE = 0.05  # seconds: what comes sooner counts as this
HALVES = 30.0  # seconds in which what a first token counts becomes half of it
DOUBT = 2.0  # first tokens like its peers' that each replica is credited with
FORGOTTEN = 0.05  # of a first token, below which it counts nothing
JUDGED_EVERY = 0.25  # seconds
NONE_SLOW: Mapping[str, float] = {}

Kind = tuple[int, str]  # of calls whose first tokens are compared: how much of a prompt is to be computed, and its turn


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


def by_beginning(
    replicas: Sequence[Target], beginning: str, loads: Sequence[int], slow: Mapping[str, float] = NONE_SLOW
) -> list[Target]:
    """Return the replicas in the order in which a call with this beginning is to try them.

    ``loads`` are the calls that run at each. Equal beginnings have one order, at any gateway; replicas at their bound
    stand behind all others, the least loaded first. Those that are ``slow``, by address, have a smaller part of calls:
    none but theirs move.
    """
    parts = [part_of(replica, slow) for replica in replicas]
    bound = MOST_LOAD * (sum(loads) + 1) / sum(parts)
    whose = blake2b(beginning.encode("utf-8", "replace"), digest_size=16).digest()
    ranked = [
        (load / part if load >= math.ceil(bound * part) else 0.0, _rank(whose, replica) / part, replica)
        for replica, load, part in zip(replicas, loads, parts, strict=True)
    ]
    return [replica for _, _, replica in sorted(ranked, key=lambda each: each[:2])]


def part_of(replica: Target, slow: Mapping[str, float]) -> float:
    """Return what part of its even share of calls a replica has: all of it, unless it is slow."""
    return (SLOW / slow[replica.endpoint.base_url]) ** 2 if replica.endpoint.base_url in slow else 1.0


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


@dataclass(slots=True, eq=False)
class Waiting:
    """A call whose first token has not come."""

    address: str
    kind: Kind  # those of one kind are compared
    since: float


class _Seen(NamedTuple):
    """First tokens of one kind of prompt at a replica, each of which counts less and less."""

    number: float
    logs: float  # of seconds, in all
    when: float = 0.0

    @property
    def mean(self) -> float:
        return self.logs / self.number

    def plus(self, log: float) -> _Seen:
        return _Seen(self.number + 1, self.logs + log, self.when)

    def at(self, now: float) -> _Seen:
        kept = 0.5 ** ((now - self.when) / HALVES)
        return _Seen(self.number * kept, self.logs * kept, now)


NOTHING_SEEN = _Seen(0.0, 0.0)
Known = defaultdict[Kind, dict[str, _Seen]]


class Lateness:
    """How late the first tokens of a model's replicas come beside each other's, as this process measures it: whatever
    they say of their loads. Prompts with about as much to compute, whose turn comes alike, are compared."""

    def __init__(self) -> None:
        self.slow: Mapping[str, float] = NONE_SLOW  # by address: how many times as late as its peers'
        self._seen: dict[tuple[Kind, str], _Seen] = {}  # by kind of prompt and address
        self._waiting: dict[Waiting, None] = {}
        self._judged = -math.inf

    def begin(self, address: str, uncached: int, turn: str, now: float) -> Waiting:
        """Note that a prompt goes to a replica, which is to compute so many bytes of it. ``turn``: ``batch``, or its
        priority among its team's: an engine has them wait for others."""
        waiting = Waiting(address, (max(uncached, 1024).bit_length() // 2, turn), now)
        self._waiting[waiting] = None
        self.judge(now)
        return waiting

    def note_first_token(self, waiting: Waiting, now: float) -> None:
        """Note that the first token of a call has come. Twice is once."""
        if waiting in self._waiting:
            del self._waiting[waiting]
            self._see(waiting, now)
            self.judge(now)

    def end(self, waiting: Waiting, now: float) -> None:
        """Note that a call is there no more. If its first token was late, it counts as one that came now."""
        if waiting in self._waiting:
            del self._waiting[waiting]
            if now - waiting.since > _patience(self._known(now)[waiting.kind], waiting.address):
                self._see(waiting, now)

    def keep(self, addresses: Container[str]) -> None:
        """Forget replicas at other addresses."""
        self._seen = {key: seen for key, seen in self._seen.items() if key[1] in addresses}
        self.slow = {address: times for address, times in self.slow.items() if address in addresses}

    def _see(self, waiting: Waiting, now: float) -> None:
        key = waiting.kind, waiting.address
        self._seen[key] = self._seen.get(key, NOTHING_SEEN).at(now).plus(_log(now - waiting.since))

    def _known(self, now: float) -> Known:
        """Return what counts now, by kind of prompt and address."""
        known: Known = defaultdict(dict)
        for (kind, address), seen in self._seen.items():
            if (kept := seen.at(now)).number > FORGOTTEN:
                known[kind][address] = kept
        return known

    def judge(self, now: float) -> None:
        """Compare all replicas, by first tokens and by those calls that wait longer than others waited for theirs."""
        if now < self._judged + JUDGED_EVERY:
            return
        self._judged, known = now, self._known(now)
        self._seen = {(kind, address): seen for kind, of_kind in known.items() for address, seen in of_kind.items()}
        kinds = {(waiting.kind, waiting.address) for waiting in self._waiting}
        patience = {(kind, address): _patience(known[kind], address) for kind, address in kinds}
        late = [one for one in self._waiting if now - one.since > patience[one.kind, one.address]]
        for waiting in late:
            of_kind = known[waiting.kind]
            of_kind[waiting.address] = of_kind.get(waiting.address, NOTHING_SEEN).plus(_log(now - waiting.since))
        weighed, weights = defaultdict[str, float](float), defaultdict[str, float](float)
        for of_kind in known.values():
            for address, own in of_kind.items():
                if (others := _others(of_kind, address)).number:
                    weight = own.number * others.number / (own.number + others.number)
                    weighed[address] += weight * max(-MOST_LATE, min(MOST_LATE, own.mean - others.mean))
                    weights[address] += weight
        times = {address: math.exp(weighed[address] / (weight + DOUBT)) for address, weight in weights.items()}
        self.slow = {address: late for address, late in times.items() if late > SLOW}


def _patience(of_kind: Mapping[str, _Seen], address: str) -> float:
    """Return the seconds after which a first token of a replica is late, by those of others."""
    others = _others(of_kind, address)
    return SLOW * math.exp(others.mean) if others.number else math.inf


def _others(of_kind: Mapping[str, _Seen], address: str) -> _Seen:
    others = [seen for where, seen in of_kind.items() if where != address]
    return _Seen(sum(seen.number for seen in others), sum(seen.logs for seen in others))


def _log(seconds: float) -> float:
    return math.log(max(seconds, AT_ONCE))


class Standing(NamedTuple):
    """What a gateway knows of a replica as it places a prompt. All in bytes of prompts."""

    found: Found  # of this one
    uncached: int  # of those on their way that are still to be computed there
    running: int = 0  # of those whose calls are there
    rate: float = 0.0  # that it computes in a second, as measured; 0: not known
    part: float = 1.0  # of an even share of calls: less where it is slow, and then what it has cached is no reason


def by_work(replicas: Sequence[Target], standings: Sequence[Standing], size: int) -> list[Target]:
    """Return the replicas in the order in which a prompt of ``size`` bytes is to try them: the one first that has it
    computed soonest; before it one that has nearly all of it cached and is not saturated, where it costs the fleet
    least."""
    ranked = [
        (
            one.part < 1 or one.found.worth < STICKY * size or one.uncached > PENALTY * one.rate,
            (one.uncached + size - (0 if one.part < 1 else one.found.worth) + RUNNING * one.running) / one.part,
            place,
        )
        for place, one in enumerate(standings)
    ]
    return [replicas[place] for _, _, place in sorted(ranked)]


def _rank(whose: bytes, replica: Target) -> float:
    """Draw from the exponential distribution: the least of several, each over its part, is each's in proportion."""
    digest = blake2b(replica.endpoint.base_url.encode(), key=whose, digest_size=8).digest()
    return -math.log1p(-(int.from_bytes(digest, "big") >> 11) / 2**53)
