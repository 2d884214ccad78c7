# Whatever an upstream sends, a call ends in an answer or in a failure of ours: no other exception, no endless work.

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import msgspec
import pytest

from gateway.calls.accumulate import Collector
from gateway.dialects.responses_writer import ResponsesWriter
from gateway.upstreams.provider_batches import WIRES
from gateway.upstreams.wire.errors import UpstreamFailure
from protocol.events import Delta
from protocol.responses import ResponsesRequest
from tests.support.response_stream import events_in
from tests.unit.gateway.dialects.test_responses_writer import REPLY
from tests.wire.responses_traffic import RESPONSES
from tests.wire.test_conformance import formats
from tests.wire.traffic import WireFormat, read_stream

ODD: tuple[Any, ...] = (
    None, True, 0, -1, 7, 2**31, 10**30, 0.5, 1e308, "", "x", "\u0000", "null", [], [None], [[]], [1], ["x"], {},
    {"a": 1}, {"type": "x"}, {"index": -5}, "[DONE]", "🚪" * 20,
)  # fmt: skip


def spoilt(value: Any, dice: random.Random) -> Any:
    """Return JSON with some of its values replaced, left out or doubled."""
    if dice.random() < 0.04:
        return dice.choice(ODD)
    if isinstance(value, dict):
        return {name: spoilt(item, dice) for name, item in value.items() if dice.random() > 0.03}
    if isinstance(value, list):
        return [spoilt(item, dice) for item in value for _ in range(1 + (dice.random() < 0.05))]
    return value


def spoilt_stream(stream: bytes, dice: random.Random) -> bytes:
    lines = []
    for line in stream.splitlines():
        if line.startswith(b"data: {"):
            with contextlib.suppress(ValueError):  # some are spoilt already
                line = b"data: " + json.dumps(spoilt(json.loads(line[6:]), dice)).encode()
        if dice.random() < 0.01:
            place = dice.randrange(len(line) + 1)
            line = line[:place] + dice.randbytes(dice.randrange(4)) + line[place + dice.randrange(3) :]
        lines.append(line)
    return b"\n".join(lines) + b"\n\n"


@formats
@pytest.mark.parametrize("seed", range(5))
def test_a_spoilt_stream_ends_in_an_answer_or_a_failure(wire: WireFormat, seed: int) -> None:
    """Values of any other type, fields left out or doubled, bytes that are no text."""
    dice = random.Random(seed)
    for streamed in wire.streamed * 4:
        stream = spoilt_stream(streamed.stream, dice)
        events, _ = read_stream(wire.make().open_events(streamed.request), [stream])
        collector = Collector(streamed.request)
        for event in events:
            if isinstance(event, Delta):
                collector.add(event)

        assert collector.reply() is not None


@pytest.mark.parametrize("seed", range(5))
def test_a_spoilt_response_is_written_as_events_all_the_same(seed: int) -> None:
    """What goes through as it came is numbered, one line of JSON an event, and named as it says."""
    dice = random.Random(seed)
    for streamed in RESPONSES.streamed * 4:
        writer = ResponsesWriter(ResponsesRequest(model="m", input="a"), "0-" + "1" * 31, 1)
        events, _ = read_stream(RESPONSES.make().open_events(streamed.request), [spoilt_stream(streamed.stream, dice)])
        written = b"".join(writer.pieces(REPLY, [event]) for event in events)
        ids = [item["id"] for item in json.loads(msgspec.json.encode(writer.unfinished("failed")))["output"]]

        assert len(events_in(written.decode())) > 0 or not events
        assert all("1" * 31 in ident for ident in ids)


@formats
@pytest.mark.parametrize("seed", range(5))
def test_a_spoilt_body_is_an_answer_or_a_failure(wire: WireFormat, seed: int) -> None:
    """The same for whole replies, and for the bodies of refusals under any status."""
    dice = random.Random(seed)
    for whole in wire.whole * 8:
        body = json.dumps(spoilt(json.loads(whole.body), dice)).encode()
        try:
            reply, _ = wire.make().read_reply(whole.request, body)
        except UpstreamFailure:
            continue
        assert reply is not None
    for failing in wire.failing * 8:
        try:
            body = json.dumps(spoilt(json.loads(failing.body), dice)).encode()
        except ValueError:
            body = failing.body
        error = wire.make().read_error(failing.status, {"retry-after": str(dice.choice(ODD))}, body)

        assert error.message and error.status >= 400


BROKEN = (b"\xff", b'{"\xc3":1}', b'{"choices":[{"delta":{"content":"\xc3"}}]}', b'{"type":"\xba"}', b"[" * 100_000,
          b'{"usage":' * 50_000, b'{"choices":[{"stop_reason":' + b"[" * 100_000, b"NaN", b"{}{}", b"7",
          b'"x"')  # fmt: skip


@formats
@pytest.mark.parametrize("data", BROKEN, ids=lambda data: repr(data[:40]))
def test_bytes_that_are_no_json_are_the_upstreams_fault(wire: WireFormat, data: bytes) -> None:
    """Text that is no UTF-8 and nesting without end, in a stream, in a body and in a refusal."""
    provider, asked = wire.make(), wire.streamed[0].request
    _, outcome = read_stream(provider.open_events(asked), [b"data: ", data, b"\n\n"])
    with pytest.raises(UpstreamFailure) as caught:
        provider.read_reply(asked, data)

    assert outcome in ("malformed", "cut")
    assert caught.value.outcome == "malformed"
    assert provider.read_error(400, {}, data).message


LISTS: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "openai": (
        "data",
        {"id": "theirs", "status": "failed", "errors": {"object": "list", "data": None}},
        {"id": "ours", "status": "completed", "metadata": {"tollgate": "pb_1"}},
    ),
    "anthropic": (
        "data",
        {"id": "theirs", "processing_status": "ended", "request_counts": None},
        {"id": "ours", "processing_status": "in_progress", "request_counts": {"processing": 3}},
    ),
    "gemini": ("operations", {"metadata": {}}, {"name": "ours", "metadata": {"displayName": "pb_1"}}),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_batch_of_another_program_hides_none_of_ours(name: str) -> None:
    """One that is not as the provider documents it is passed over: ours, of which nothing was heard, is found."""
    listed, theirs, ours = LISTS[name]
    unstorable = {**ours, "id": "a\0", "name": "a\0"}  # Postgres knows no NUL in text

    assert [one.id for one in WIRES[name].read_list({listed: [theirs, ours, unstorable, 7]})] == ["ours"]
