# What connections keep of responses that are not stored: whose room it is.

from __future__ import annotations

from gateway.stored_responses.local_turns import ConnectionTurns, LocalTurns

BOUND = 10_000


def turns_of(shared: LocalTurns, team_id: str) -> ConnectionTurns:
    turns = ConnectionTurns(shared)
    turns.begin(team_id)
    return turns


def end(turns: ConnectionTurns, response_id: str, size: int, stream: str | None = None) -> None:
    """Let a response end that takes so many bytes with what it was asked."""
    event = b'{"response": {"id": "%s", "output": []}}' % response_id.encode()
    turns.note_asked((), size - len(event))
    turns.keep(stream, event)


def test_a_team_that_fills_the_room_drops_its_own_turns() -> None:
    """The oldest of the team that has most goes, however many connections and streams it comes by."""
    shared = LocalTurns(BOUND)
    small = turns_of(shared, "small")
    end(small, "of_small", 1_000)
    large = [turns_of(shared, "large") for _ in range(3)]
    for number, turns in enumerate(large * 2):
        end(turns, f"of_large_{number}", 4_000, stream=f"{number}")

    assert small.find("of_small") is not None
    kept = [number for number, turns in enumerate(large * 2) if turns.find(f"of_large_{number}") is not None]
    assert kept == [4, 5]
    for turns in large:
        turns.close()
    end(small, "whole", BOUND)
    assert small.find("whole") is not None


def test_a_response_with_an_item_of_an_unknown_type_is_not_kept() -> None:
    """Its connection goes on."""
    turns = turns_of(LocalTurns(BOUND), "team")
    turns.note_asked((), 0)
    turns.keep(None, b'{"response": {"id": "resp_1", "output": [{"type": "new_call"}]}}')

    assert turns.find("resp_1") is None
