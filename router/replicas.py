# Which replica of our own engine a call goes to: the one that has probably computed its beginning before, unless that
# runs more than its part. Rendezvous hashing (Thaler and Ravishankar, IEEE/ACM ToN 6(1), 1998), so that a replica that
# goes moves no other replica's calls, with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA 2018).

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b

from router.catalog.targets import Target

MOST_LOAD = 1.25  # of the mean, beyond which a replica is passed by


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


def _rank(whose: bytes, replica: Target) -> bytes:
    return blake2b(replica.endpoint.base_url.encode(), key=whose, digest_size=8).digest()
