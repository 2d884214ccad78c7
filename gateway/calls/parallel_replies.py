# Several replies of a provider that gives one at a time: as many requests at once, read as the choices of one reply.
# All of them answer, or none does: the first that fails before all have begun fails the attempt, and the others are let
# go; one that breaks later breaks the reply. Who leaves lets go of all.

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

from msgspec.structs import replace

from gateway.calls.answering import Answering
from gateway.upstreams.client import UpstreamResponse
from gateway.upstreams.connection import SILENT
from gateway.upstreams.wire.base import Delivery, UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamFailure, UpstreamTimeout, UpstreamUnable
from protocol.chat import ChatReply
from protocol.events import Delta, Event, ReplyEnd, UsageReport
from protocol.serving.deadlines import running_timeout
from protocol.usage import Usage

MOST = 16  # requests that one call makes at once


def check_number(number: int) -> None:
    """Raise UpstreamUnable for more replies than are asked for at once."""
    if number > MOST:
        words = f"The model that answers here gives one reply at a time, and is asked for {MOST} at once at the most."
        raise UpstreamUnable(f"{words} Send a smaller 'n'.", outcome="unsupported", param="n")


async def answered_at_once(
    number: int,
    built: UpstreamRequest,
    send: Callable[[UpstreamRequest], Awaitable[UpstreamResponse]],
    hear: Callable[[Mapping[str, str]], None],
    read: Callable[[UpstreamResponse], Awaitable[Answering]],
) -> Answering:
    """Send ``built`` so many times, and return the answers as one, once each has begun: ``hear`` is told the headers of
    each, ``read`` reads it up to its first token. Raises the first failure, the others let go."""

    async def ask(one: UpstreamRequest) -> Answering:
        response = await send(one)
        hear(response.headers)
        return await read(response)

    sent = [built, *(replace(built, delivery=Delivery()) for _ in range(number - 1))]
    tasks = [asyncio.ensure_future(ask(one)) for one in sent]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
        return _joined([task.result() for task in tasks])
    except BaseException:
        for task in tasks:
            task.cancel()
            task.add_done_callback(_let_go)
        raise


def _let_go(task: asyncio.Task[Answering]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


def _joined(answers: Sequence[Answering]) -> Answering:
    first = answers[0]
    if first.whole is None:
        replies = ParallelReplies(answers)
        return replace(first, first=replies.first, events=replies, response=replies)
    choices = []
    for index, answer in enumerate(answers):
        assert isinstance(answer.whole, ChatReply)
        choices += [replace(choice, index=index) for choice in answer.whole.choices]
    usages = [answer.usage for answer in answers]
    return replace(first, whole=ChatReply(choices=tuple(choices)), usage=None if None in usages else _sum_of(usages))


def _sum_of(usages: Sequence[Usage | None]) -> Usage:
    """Return what all replies used together. Of one that has told nothing yet, its prompt: it is that of the others."""
    prompt = next((usage.input_tokens for usage in usages if usage is not None), 0)
    total = sum((usage or Usage(prompt) for usage in usages), Usage())
    return replace(total, extra_requests=len(usages) - 1)


class ParallelReplies:
    """The streams of several replies, as the response and as the events of one: read the next piece, of whichever reply
    has one, then feed it. ``first`` holds the events that have come already."""

    def __init__(self, answers: Sequence[Answering]) -> None:
        faults = (answer.events.failure for answer in answers if answer.events is not None)
        self.failure: UpstreamFailure | None = next(filter(None, faults), None)  # it came with a first token
        self._answers = list(answers)
        self._usages: list[Usage | None] = [None] * len(answers)
        self._open = set(range(len(answers)))
        self._waits: dict[int, asyncio.Task[bytes | None]] = {}
        self._speaks = 0  # whose piece was read last
        self._is_over = False  # and that it was none: its bytes have ended,
        self._broke: UpstreamFailure | None = None  # by this
        self.first: list[Event] = []
        for index, answer in enumerate(answers):
            self.first += self._of(index, answer.first)

    async def next_piece(self, patience: float = math.inf) -> bytes:
        """Return the next bytes of any reply, empty where its bytes have ended. Raises UpstreamTimeout after
        ``patience`` seconds without any."""
        for index in self._open - self._waits.keys():
            response = self._answers[index].response
            assert response is not None
            self._waits[index] = asyncio.ensure_future(response.next_piece())
        try:
            async with running_timeout(patience):
                done, _ = await asyncio.wait(self._waits.values(), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise UpstreamTimeout(SILENT) from None
        # In turns, so that none waits for one that always has something to say.
        turns = sorted(self._waits, key=lambda index: (index <= self._speaks, index))
        self._speaks = next(index for index in turns if self._waits[index] in done)
        piece, self._broke = None, None
        try:
            piece = self._waits.pop(self._speaks).result()
        except UpstreamFailure as exc:
            self._broke = exc
        self._is_over = piece is None
        return piece or b""

    def feed(self, piece: bytes) -> list[Event]:
        """Return the events that the last piece completes, each with the index of its reply. Raises UpstreamFailure
        where that breaks before it has said why it ends."""
        events = self._answers[self._speaks].events
        assert events is not None
        try:
            found = events.finish() if self._is_over else events.feed(piece)
        except UpstreamFailure as exc:
            raise self._broke or exc from None
        self.failure = events.failure
        return self._of(self._speaks, found)

    def finish(self) -> list[Event]:
        """Return the ends of all replies that are open. Raises UpstreamError where one has not said why it ends."""
        found: list[Event] = []
        for index in sorted(self._open):
            if (events := self._answers[index].events) is not None:
                found += self._of(index, events.finish())
        return found

    def close(self) -> None:
        """Let every upstream go."""
        for index, answer in enumerate(self._answers):
            if (wait := self._waits.pop(index, None)) is not None:
                wait.cancel()
            answer.close()

    def _of(self, index: int, events: Sequence[Event]) -> list[Event]:
        """Return the events of one reply as those of a choice; the end is that of the last."""
        found: list[Event] = []
        for event in events:
            match event:
                case Delta():
                    found.append(replace(event, index=index))
                case UsageReport(usage):
                    self._usages[index] = usage
                    found.append(UsageReport(_sum_of(self._usages)))
                case ReplyEnd():
                    self._open.discard(index)
                    self._answers[index].close()
                    if not self._open:
                        found.append(event)
        return found
