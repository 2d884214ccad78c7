# What every wire format must do, run over all of them with each one's own traffic.

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.upstreams.wire.errors import UpstreamError
from protocol.chat import ChatReply
from protocol.completions import CompletionReply
from protocol.embeddings import EmbeddingReply
from protocol.events import Delta, ReplyEnd
from tests.wire.anthropic_traffic import ANTHROPIC
from tests.wire.bedrock_traffic import BEDROCK
from tests.wire.gemini_traffic import GEMINI
from tests.wire.openai_traffic import OPENAI
from tests.wire.responses_traffic import RESPONSES
from tests.wire.traffic import Failing, Said, Streamed, Whole, WireFormat, asking, read_stream, sum_up

FORMATS = (OPENAI, RESPONSES, ANTHROPIC, GEMINI, BEDROCK)


def every(kind: str) -> list[ParameterSet]:
    return [
        pytest.param(wire, item, id=f"{wire.name}: {getattr(item, 'name', item)}")
        for wire in FORMATS
        for item in getattr(wire, kind)
    ]


formats = pytest.mark.parametrize("wire", FORMATS, ids=lambda wire: wire.name)
streams = pytest.mark.parametrize(("wire", "streamed"), every("streamed"))
# Cut at so many bytes, and around each end of a line and inside each character: at every byte in a soak.
steps = pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.soak)], ids=["some cuts", "all cuts"])


def places_in(stream: bytes, step: int) -> list[int]:
    """Return where to cut a stream: every ``step`` bytes, before the last, and beside those that readers look for."""
    telling = [place for place, byte in enumerate(stream) if byte in b"\r\n" or byte >= 0x80]
    places = {*range(0, len(stream), step), len(stream) - 1, *telling, *(place + 1 for place in telling)}
    return sorted(places & {*range(len(stream))})


def events_of(wire: WireFormat, streamed: Streamed, pieces: list[bytes]) -> tuple[list[object], str | None]:
    events, outcome = read_stream(wire.make().open_events(streamed.request), pieces)
    return [*events], outcome


@streams
def test_a_stream_means_what_it_says(wire: WireFormat, streamed: Streamed) -> None:
    """Text, calls, refusal, reasons, usage and outcome come out as recorded, and exactly one end of a whole reply."""
    events, outcome = read_stream(wire.make().open_events(streamed.request), [streamed.stream])

    assert sum_up(events, len(streamed.said.text)) == streamed.said
    assert outcome == streamed.outcome
    assert sum(isinstance(event, ReplyEnd) for event in events) == (0 if outcome else 1)


@steps
@streams
def test_every_split_in_two_gives_the_same_events(wire: WireFormat, streamed: Streamed, step: int) -> None:
    """Where the network cuts the bytes is nobody's business."""
    whole = events_of(wire, streamed, [streamed.stream])

    for place in places_in(streamed.stream, step):
        assert events_of(wire, streamed, [streamed.stream[:place], streamed.stream[place:]]) == whole, place


@streams
def test_single_bytes_give_the_same_events(wire: WireFormat, streamed: Streamed) -> None:
    """The slowest drip is read like one piece."""
    pieces = [streamed.stream[place : place + 1] for place in range(len(streamed.stream))]

    assert events_of(wire, streamed, pieces) == events_of(wire, streamed, [streamed.stream])


@formats
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_any_cuts_give_the_same_events(wire: WireFormat, data: st.DataObject) -> None:
    """However many cuts there are, and wherever."""
    streamed = data.draw(st.sampled_from(wire.streamed))
    cuts = data.draw(st.lists(st.integers(0, len(streamed.stream)), max_size=30).map(sorted))
    ends = [*cuts, len(streamed.stream)]
    pieces = [streamed.stream[start:end] for start, end in zip([0, *cuts], ends, strict=True)]

    assert events_of(wire, streamed, pieces) == events_of(wire, streamed, [streamed.stream])


@steps
@streams
def test_a_stream_cut_anywhere_is_never_whole_by_mistake(wire: WireFormat, streamed: Streamed, step: int) -> None:
    """A stream that ends early ends in a failure, unless every choice had said why it ends."""
    for place in places_in(streamed.stream, step):
        events, outcome = read_stream(wire.make().open_events(streamed.request), [streamed.stream[:place]])
        reasons = {event.index for event in events if isinstance(event, Delta) and event.finish_reason is not None}

        is_whole = len(reasons) == len(streamed.said.text)
        assert any(isinstance(event, ReplyEnd) for event in events) == (outcome is None), place
        assert is_whole or outcome is not None, place


@pytest.mark.parametrize(("wire", "whole"), every("whole"))
def test_a_whole_reply_means_what_it_says(wire: WireFormat, whole: Whole) -> None:
    """The same facts come out of a body as out of a stream."""
    reply, usage = wire.make().read_reply(whole.request, whole.body)

    match reply:
        case ChatReply(choices=choices):
            calls = [(call.id, call.function.name, call.function.arguments)
                     for choice in choices for call in choice.message.tool_calls or ()]  # fmt: skip
            texts = tuple(choice.message.content or "" for choice in choices)
            refusal = "".join(choice.message.refusal or "" for choice in choices)
            said = Said(texts, tuple(choice.finish_reason for choice in choices), refusal, tuple(calls), usage)
        case CompletionReply(choices=texts_only):
            texts = tuple(choice.text for choice in texts_only)
            said = Said(texts, tuple(choice.finish_reason for choice in texts_only), usage=usage)
        case EmbeddingReply(vectors=vectors):
            said = Said(tuple(str(list(vector)) for vector in vectors), (), usage=usage)
    assert said == whole.said


@pytest.mark.parametrize(("wire", "body"), every("nonsense"))
def test_nonsense_under_a_200_is_the_upstreams_fault(wire: WireFormat, body: bytes) -> None:
    """A body that is no reply is an UpstreamError, which lets another target answer."""
    with pytest.raises(UpstreamError) as caught:
        wire.make().read_reply(asking().request, body)

    assert (caught.value.status, caught.value.moves_on) == (502, True)


@pytest.mark.parametrize(("wire", "failing"), every("failing"))
def test_a_failing_status_is_told_honestly(wire: WireFormat, failing: Failing) -> None:
    """The client never sees our own 401 or 403; what is its own fault it hears in the upstream's words."""
    error = wire.make().read_error(failing.status, failing.headers, failing.body)

    assert (error.status, error.code, error.moves_on) == (failing.client_status, failing.code, failing.moves_on)
    assert error.outcome == failing.outcome
    assert list(error.body()["error"]) == ["message", "type", "param", "code"]  # type: ignore[call-overload]
    assert error.message


@formats
def test_two_replies_do_not_share_state(wire: WireFormat) -> None:
    """Readers of one provider may be interleaved, piece by piece."""
    provider = wire.make()
    one, two = wire.streamed[0], wire.streamed[1]
    first, second = provider.open_events(one.request), provider.open_events(two.request)
    seen_first, seen_second = [], []
    for place in range(0, max(len(one.stream), len(two.stream)), 7):
        seen_first += first.feed(one.stream[place : place + 7])
        seen_second += second.feed(two.stream[place : place + 7])

    assert (sum_up(seen_first, 1), sum_up(seen_second, 1)) == (one.said, two.said)


@formats
@pytest.mark.parametrize("streams", [False, True])
def test_a_request_goes_to_the_target_with_our_key_alone(wire: WireFormat, streams: bool) -> None:
    """The model has its upstream name, the key is the house's, and nothing of the team is in the headers."""
    built = wire.make().build_request(asking(streams=streams, tenant="team-secret"))

    assert built.method == "POST" and built.url.startswith("https://upstream.example/v1/")
    assert b"upstream-model" in built.url.encode() + built.body and b"asked-model" not in built.body
    assert any("sk-house" in value for value in built.headers.values())
    assert "team-secret" not in str(built.headers) and b"team-secret" not in built.body
