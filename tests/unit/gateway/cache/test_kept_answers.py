# What the cache keeps of an answer is all of it, for every wire format and whatever it says; sealed bytes open in their
# place alone.

from __future__ import annotations

import pytest

from gateway.cache.kept_answers import KeptAnswer, Place, calls_tools, may_keep, seal, unseal, was_filtered
from gateway.storage.encryption import Sealer
from protocol.chat import ChatReply, FinishReason
from protocol.completions import CompletionReply
from protocol.events import Delta, ReplyEnd, ToolCallDelta, UsageReport
from protocol.usage import Usage
from tests.wire.test_conformance import every
from tests.wire.traffic import Streamed, Whole, WireFormat, read_stream

PLACE = Place("team:team_a", "ab" * 32)
SEALER = Sealer("pepper of this test", "cache")
USED = Usage(input_tokens=3, output_tokens=5)


@pytest.mark.parametrize(("wire", "whole"), every("whole"))
def test_an_answer_that_came_whole_is_read_back_whole(wire: WireFormat, whole: Whole) -> None:
    """Every recorded answer of every format comes back equal, but those in blocks, which are not kept."""
    reply, _ = wire.make().read_reply(whole.request, whole.body)
    kind = {ChatReply: "chat", CompletionReply: "completion"}.get(type(reply), "embedding")
    answer = KeptAnswer(usage=USED, dropped=("seed",), **{kind: reply})  # type: ignore[arg-type]
    if not may_keep(answer):
        assert isinstance(reply, ChatReply) and any(choice.message.blocks for choice in reply.choices)
        return

    again = unseal(SEALER, PLACE, seal(SEALER, PLACE, answer))
    assert again == answer and again is not None
    assert (again.whole, again.events()) == (reply, [])


@pytest.mark.parametrize(("wire", "streamed"), every("streamed"))
def test_an_answer_in_pieces_is_read_back_in_pieces(wire: WireFormat, streamed: Streamed) -> None:
    """Every recorded stream of every format comes back delta by delta, with the usage that it was charged by."""
    read, _ = read_stream(wire.make().open_events(streamed.request), [streamed.stream])
    deltas = tuple(event for event in read if isinstance(event, Delta))
    answer = KeptAnswer(usage=USED, pieces=deltas)

    again = unseal(SEALER, PLACE, seal(SEALER, PLACE, answer))
    assert again is not None
    assert again.events() == [*deltas, UsageReport(USED), ReplyEnd()]


def test_a_text_stands_for_a_delta_of_nothing_else() -> None:
    """Plain pieces are kept as texts."""
    answer = KeptAnswer(usage=USED, pieces=("Hel", "lo", Delta(finish_reason=FinishReason.STOP)))

    again = unseal(SEALER, PLACE, seal(SEALER, PLACE, answer))
    assert again == answer and again is not None
    assert again.events()[:2] == [Delta(text="Hel"), Delta(text="lo")]


@pytest.mark.parametrize("other", [Place("team:team_b", PLACE.name), Place(PLACE.scope, "cd" * 32)])
def test_a_sealed_answer_opens_in_its_place_alone(other: Place) -> None:
    """Moved to another team or name, changed, or sealed for another purpose, it is none."""
    sealed = seal(SEALER, PLACE, KeptAnswer(usage=USED, pieces=("x",)))

    assert unseal(SEALER, other, sealed) is None
    assert unseal(SEALER, PLACE, sealed[:-1] + bytes([sealed[-1] ^ 1])) is None
    assert unseal(SEALER, PLACE, b"") is None
    assert unseal(Sealer("pepper of this test", "idempotency"), PLACE, sealed) is None


def test_what_is_not_kept_is_told_apart() -> None:
    """Calls of tools, and answers that a filter cut."""
    calls = KeptAnswer(usage=USED, pieces=(Delta(tool_calls=(ToolCallDelta(0, "{}", "call_1", "look"),)),))
    cut = KeptAnswer(usage=USED, pieces=("x", Delta(finish_reason=FinishReason.CONTENT_FILTER)))

    assert (calls_tools(calls), was_filtered(calls)) == (True, False)
    assert (calls_tools(cut), was_filtered(cut)) == (False, True)
