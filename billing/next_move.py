# What an owner does about the epoch that it sees. Pure: restore.py looks, and acts.

from __future__ import annotations

from enum import StrEnum

from billing.epochs import Seen

FRESH = "*"  # joined: whatever is ready, because nothing was opened, adopted or flushed yet


class Move(StrEnum):
    """What an owner does about the epoch that it sees."""

    STAY = "stay"  # it is ready, and what we know is in it
    JOIN = "join"  # it is ready, and we know nothing yet
    PUT_BACK = "put back"  # it gathers
    WAIT = "wait"  # it gathers, and we have put back
    START = "start"  # a new one has to begin


def next_move(seen: Seen, owner: str, *, joined: str, put_back_in: str, run_id: str) -> tuple[Move, str]:
    """Return what ``owner`` does next, and why.

    ``joined`` is the epoch it counts in without having put anything back, "" for none, FRESH for whichever is ready;
    ``put_back_in`` the last one into which it tried to; ``run_id`` the Redis server that answers now.
    """
    epoch = seen.epoch
    if epoch is None:
        return Move.START, "there is no epoch: Redis is new, or was wiped"
    if not epoch.is_ready:
        if seen.now >= epoch.until or epoch.who == owner:
            return Move.START, "a rebuild was broken off"
        return (Move.WAIT if put_back_in == epoch.id else Move.PUT_BACK), ""
    if epoch.wanted:
        return Move.START, epoch.wanted
    if run_id and epoch.run_id and run_id != epoch.run_id:
        return Move.START, "Redis was started again and may have lost its last moments"
    if joined == epoch.id or epoch.owners.get(owner, (False, 0.0))[0]:
        return Move.STAY, ""
    return (Move.JOIN, "") if joined == FRESH else (Move.START, "an epoch began without us")
