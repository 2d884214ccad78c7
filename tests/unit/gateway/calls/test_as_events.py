# A whole reply and the events that it is unrolled to are the same thing.

from __future__ import annotations

import pytest

from gateway.calls.accumulate import Collector
from gateway.calls.as_events import events_of
from protocol.chat import ChatReply
from protocol.completions import CompletionReply
from protocol.events import Delta, ReplyEnd, UsageReport
from tests.wire.test_conformance import every
from tests.wire.traffic import Whole, WireFormat


@pytest.mark.parametrize(("wire", "whole"), every("whole"))
def test_what_is_unrolled_collects_to_the_same_reply(wire: WireFormat, whole: Whole) -> None:
    """Text, thinking, calls, refusals, reasons and the upstream's count: nothing is lost on the way."""
    reply, usage = wire.make().read_reply(whole.request, whole.body)
    if not isinstance(reply, ChatReply | CompletionReply):
        return
    events = events_of(reply, usage)
    collector = Collector(whole.request)
    for event in events:
        if isinstance(event, Delta):
            collector.add(event)
    again = collector.reply()

    assert isinstance(events[-1], ReplyEnd)
    assert [event.usage for event in events if isinstance(event, UsageReport)] == ([] if usage is None else [usage])
    assert isinstance(again, type(reply)) and len(again.choices) == len(reply.choices)
    for one, other in zip(again.choices, reply.choices, strict=True):
        assert (one.index, one.finish_reason) == (other.index, other.finish_reason)
        if isinstance(reply, ChatReply):
            said, meant = one.message, other.message  # type: ignore[union-attr]
            assert (said.content or "", said.refusal, said.tool_calls) == (
                meant.content or "", meant.refusal, meant.tool_calls,
            )  # fmt: skip
            assert said.reasoning_content == meant.reasoning_content
