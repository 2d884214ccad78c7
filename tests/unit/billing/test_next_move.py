# What an owner does about the epoch that it sees.

from __future__ import annotations

from typing import Any

import pytest

from billing.epochs import Epoch, Seen
from billing.next_move import FRESH, Move, next_move

NOW = 1000.0


def epoch(**fields: Any) -> Epoch:
    """Return an epoch that is ready and in which we have put back."""
    usual: dict[str, Any] = {
        "id": "e1",
        "is_ready": True,
        "who": "other",
        "until": NOW + 5,
        "since": NOW - 1,
        "ready_at": NOW - 1,
        "read_at": NOW - 1,
        "run_id": "server",
        "wanted": "",
        "owners": {"us": (True, NOW + 9)},
    }
    return Epoch(**(usual | fields))


@pytest.mark.parametrize(
    ("seen", "joined", "put_back_in", "move"),
    [
        (epoch(), "", "e1", Move.STAY),
        (epoch(owners={}), "e1", "", Move.STAY),
        (None, "e1", "", Move.START),
        (epoch(owners={}), FRESH, "", Move.JOIN),
        (epoch(owners={}), "", "", Move.START),
        (epoch(owners={}), "e0", "", Move.START),
        (epoch(owners={"us": (False, NOW + 9)}), "", "e1", Move.START),
        (epoch(run_id="another"), "", "e1", Move.START),
        (epoch(run_id=""), "", "e1", Move.STAY),
        (epoch(wanted="the audit"), "", "e1", Move.START),
        (epoch(is_ready=False, owners={}), "", "", Move.PUT_BACK),
        (epoch(is_ready=False, owners={}), FRESH, "", Move.PUT_BACK),
        (epoch(is_ready=False), "", "e1", Move.WAIT),
        (epoch(is_ready=False, until=NOW), "", "e1", Move.START),
        (epoch(is_ready=False, who="us"), "", "e1", Move.START),
    ],
    ids=[
        "ours",
        "joined",
        "wiped",
        "new here",
        "began without us",
        "another than we joined",
        "our report was broken off",
        "Redis was started again",
        "Redis does not tell its name",
        "somebody asked",
        "gathers",
        "gathers while we start",
        "gathers, and we have put back",
        "its leader is dead",
        "we broke it off ourselves",
    ],
)
def test_each_sight_has_its_move(seen: Epoch | None, joined: str, put_back_in: str, move: Move) -> None:
    """Whoever is not sure to be in the books starts new ones."""
    found, why = next_move(Seen(seen, NOW), "us", joined=joined, put_back_in=put_back_in, run_id="server")

    assert found is move
    assert bool(why) == (move is Move.START)
