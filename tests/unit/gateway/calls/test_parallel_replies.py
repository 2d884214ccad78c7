# Several streams read as the choices of one: who ends early, breaks or falls silent, and what all of them used.

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest

from gateway.calls.answering import Answering
from gateway.calls.parallel_replies import ParallelReplies
from gateway.upstreams.anthropic.events import AnthropicEvents
from gateway.upstreams.wire.errors import UpstreamError, UpstreamFailure, UpstreamTimeout
from protocol.events import Delta, Event, ReplyEnd, UsageReport
from tests.wire.anthropic_traffic import COUNTED, end, event, start, text

pytestmark = pytest.mark.anyio
OVERLOADED = event("error", error={"type": "overloaded_error", "message": "Overloaded"})


class Response:
    """Gives pieces one after the other; a failure among them is raised, and after the last there is silence."""

    def __init__(self, *pieces: bytes | UpstreamFailure | None) -> None:
        self.pieces = list(pieces)
        self.is_closed = False

    async def next_piece(self, patience: float = 0.0) -> bytes | None:
        await asyncio.sleep(0)
        if not self.pieces:
            await asyncio.Event().wait()
        piece = self.pieces.pop(0)
        if isinstance(piece, UpstreamFailure):
            raise piece
        return piece

    def close(self) -> None:
        self.is_closed = True


def begun(first: bytes, *later: bytes | UpstreamFailure | None) -> Answering:
    """Return a stream whose first bytes were read."""
    events = AnthropicEvents()
    seen = events.feed(first)
    return Answering(cast(Any, None), cast(Any, None), seen, events, Response(*later))


async def read(replies: ParallelReplies, patience: float = 1.0) -> list[Event]:
    """Return all events, as a reply's reader takes them."""
    seen = list(replies.first)
    while not any(isinstance(one, ReplyEnd) for one in seen):
        if replies.failure is not None:
            raise replies.failure
        seen += replies.feed(await replies.next_piece(patience))
    return seen


def texts(events: list[Event]) -> list[str]:
    said = ["", ""]
    for one in events:
        if isinstance(one, Delta):
            said[one.index] += one.text
    return said


HEAD = start() + text("Grü")


async def test_the_end_is_that_of_the_last_and_the_usage_that_of_all() -> None:
    """One that has ended is let go at once, while the others go on."""
    one, other = begun(HEAD, end()), begun(HEAD, text("ezi", index=1), end())
    events = await read(ParallelReplies([one, other]))
    used = [event.usage for event in events if isinstance(event, UsageReport)][-1]

    assert texts(events) == ["Grü", "Grüezi"] and isinstance(events[-1], ReplyEnd)
    assert (used.input_tokens, used.output_tokens) == (2 * COUNTED.input_tokens, 2 * COUNTED.output_tokens)
    assert used.extra_requests == 1 and cast(Response, one.response).is_closed


async def test_one_that_has_told_nothing_has_the_prompt_of_the_others() -> None:
    """So that a reply which breaks is charged for every prompt that its upstream had."""
    silent = Answering(cast(Any, None), cast(Any, None), [Delta(text="a")], AnthropicEvents(), Response())
    replies = ParallelReplies([begun(HEAD), silent])
    used = [event.usage for event in replies.first if isinstance(event, UsageReport)][-1]

    assert used.input_tokens == 2 * COUNTED.input_tokens


async def test_a_lost_end_of_one_breaks_none() -> None:
    """It had said why it ends: every word is there, and the others go on."""
    reason = end().partition(b"event: message_stop")[0]
    lost = begun(HEAD, reason, UpstreamError("gone", outcome="reset"))
    events = await read(ParallelReplies([lost, begun(HEAD, text("ezi", index=1), end())]))

    assert texts(events) == ["Grü", "Grüezi"]


@pytest.mark.parametrize("later", [UpstreamError("gone", outcome="reset"), None])
async def test_one_that_breaks_breaks_all(later: UpstreamFailure | None) -> None:
    """By its own fault; and closing lets go of every one, those that are waited for too."""
    replies = ParallelReplies([one := begun(HEAD, later), other := begun(HEAD)])
    with pytest.raises(UpstreamError) as caught:
        await read(replies)
    replies.close()

    assert caught.value.outcome == ("cut" if later is None else "reset")
    assert cast(Response, one.response).is_closed and cast(Response, other.response).is_closed


async def test_a_fault_that_came_with_a_first_token_is_told() -> None:
    """What came before it is passed on first."""
    replies = ParallelReplies([begun(HEAD + OVERLOADED), begun(HEAD, end())])

    assert texts(replies.first) == ["Grü", "Grü"]
    with pytest.raises(UpstreamError, match="reported an error"):
        await read(replies)


async def test_silence_of_all_is_late() -> None:
    """One that speaks is enough."""
    with pytest.raises(UpstreamTimeout):
        await read(ParallelReplies([begun(HEAD), begun(HEAD, text("ezi", index=1))]), patience=0.02)


async def test_what_came_while_the_process_stood_still_is_not_late() -> None:
    """The loop sees to the deadline before it hears of a piece that came within it."""
    one, other = begun(HEAD), begun(HEAD)
    replies, come = ParallelReplies([one, other]), asyncio.get_running_loop().create_future()

    async def next_piece(patience: float = 0.0) -> bytes:
        piece: bytes = await come
        await asyncio.sleep(0)  # a loop reads its sockets after its alarms have rung
        return piece

    cast(Any, one.response).next_piece = next_piece
    asyncio.get_running_loop().call_later(0.05, time.sleep, 0.3)
    asyncio.get_running_loop().call_later(0.1, come.set_result, text("ezi", index=1))

    assert texts(replies.feed(await replies.next_piece(0.2))) == ["ezi", ""]
    replies.close()
