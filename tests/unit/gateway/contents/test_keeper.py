# What is gathered of a call for its contents: what its client got and nothing else, and never much of it at once.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from billing.core.records import Status
from gateway.calls.call import Call
from gateway.contents.keeper import LONGEST, Gathered, Keeper, gathered, opened
from gateway.core.principals import Caller, Team
from gateway.storage.encryption import Sealer
from protocol.chat import FinishReason
from protocol.embeddings import EmbeddingReply, EmbeddingRequest
from protocol.events import Delta
from protocol.inference import Request
from protocol.media.audio import SpeechRequest
from router import RoutingOptions
from tests.support.factories import make_record
from tests.support.guarding import HELLO

SEALER = Sealer("pepper of this test", "call-contents")
STREAMED = replace(HELLO, stream=True)
END = Delta(finish_reason=FinishReason.STOP)


def call_of(request: Request = STREAMED, size: int = 300) -> Call:
    """Return a call of one team."""
    return Call(
        request_id="019a0000-0000-7000-8000-000000000001",
        caller=Caller(team=Team(id="team_a", name="A"), key_id="key_a"),
        endpoint="chat.completions",
        request=request,
        routing=RoutingOptions(),
        size=size,
        uploads=(memoryview(bytes(5_000_000)),),
        created_at=0.0,
        started=0.0,
    )


def kept_of(call: Call, deltas: Sequence[Delta], status: Status = Status.ANSWERED) -> Gathered:
    """Return what is kept of a call whose reply came so, and ended so."""
    kept: list[Gathered] = []
    keeper = Keeper(call, kept.append)
    for delta in deltas:
        assert keeper.delta(delta) == (delta,)
    keeper.close(make_record(call.request_id, status=status))
    return kept[0]


def read(kept: Gathered) -> dict[str, Any]:
    """Return what a reader of the row gets."""
    return opened(SEALER, kept.team_id, kept.request_id, kept.sealed(SEALER))


@pytest.mark.parametrize(
    ("status", "of_a_stream", "of_a_whole"),
    [
        (Status.ANSWERED, True, True),
        (Status.INTERRUPTED, True, False),
        (Status.SUPERSEDED, True, False),
        (Status.FAILED, False, False),
        (Status.BLOCKED, False, False),
    ],
)
def test_an_answer_is_what_its_client_got(status: Status, *, of_a_stream: bool, of_a_whole: bool) -> None:
    """The pieces that came of an answer that was to be whole, and broke, are none."""
    deltas = [Delta(text="Hel"), Delta(text="lo"), END]

    assert (read(kept_of(call_of(), deltas, status))["answer"] is not None) == of_a_stream
    assert (read(kept_of(call_of(HELLO), deltas, status))["answer"] is not None) == of_a_whole


def test_a_refusal_and_an_answer_without_a_word_are_answers() -> None:
    """A stream put together is as the same answer whole; of speech that was made, nothing is kept."""
    refused, empty = kept_of(call_of(), [Delta(refusal="No."), END]), kept_of(call_of(), [END])
    messages = [read(each)["answer"]["choices"][0]["message"] for each in (refused, empty)]
    speech = SpeechRequest(model="voice", input="Hello.", voice="alloy")

    assert [(message["content"], message["refusal"]) for message in messages] == [(None, "No."), ("", None)]
    assert read(kept_of(call_of(speech), [Delta(audio=b"RIFF"), END]))["answer"] is None


async def test_what_is_too_long_is_let_go_before_it_is_written_out() -> None:
    """Of a call its upload, of a request and of an answer what no row would hold; what is left is weighed."""
    vectors = EmbeddingReply(vectors=((0.25,) * 1536,) * 40)
    asked = call_of(EmbeddingRequest(model="vectors", input="x"))
    kept: list[Gathered] = []
    keeper = Keeper(asked, kept.append)
    assert await keeper.whole(vectors) is vectors
    keeper.close(make_record(asked.request_id, status=Status.ANSWERED))
    pieces = kept_of(call_of(), [Delta(text="x")] * 1000)
    long = kept_of(call_of(), [Delta(text="x" * 1000)] * 1100)

    assert (kept[0].answer, long.answer) == (None, None) and kept[0].weight < 10_000
    assert gathered(call_of(size=LONGEST + 1), "answered").asked is None
    assert pieces.weight > 1000 * 64 > gathered(call_of(), "answered").weight
