# One client's business with the engine: the commands it sent and the events that answer them. When the engine's process
# dies, it knows how another one goes on where the events ended.

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from gpu_backend.server.client.errors import EngineFailed
from gpu_backend.step.messages import Abort, Command, Embed, Embedding, FinishReason, Generate, NewTokens, Timings
from protocol.errors import Overloaded


class Client(Protocol):
    """What a call asks of the ``EngineClient`` that made it."""

    def send(self, command: Command) -> None: ...

    def forget(self, request_ids: Iterable[str]) -> None: ...


@dataclass(slots=True)
class _ReplySoFar:
    """What has been told of one reply."""

    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    gpu_seconds: float = 0.0
    gpu_seconds_before: float = 0.0  # of these, in processes that died
    is_resumed: bool = False
    is_stopped: bool = False  # its text has ended; only its last event is waited for


class EngineCall:
    """One client's commands and the events that answer them. Close it, whatever happens: unfinished work is aborted.

    With ``fails_over`` its client goes on at another replica when the engine's process dies, and is told so at once.
    """

    def __init__(self, client: Client, commands: Sequence[Generate | Embed], *, fails_over: bool = False) -> None:
        self.fails_over = fails_over
        self.deaths = 0  # of processes that had it
        pictures = [picture for command in commands if isinstance(command, Generate) for picture in command.pictures]
        self.picture_bytes = sum(len(picture.pixels) for picture in pictures)
        self._client = client
        self._arrived: list[NewTokens | Embedding] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: EngineFailed | Overloaded | None = None
        self._commands = {command.request_id: command for command in commands}
        self._open = {command.request_id: _replies(command) for command in commands}  # replies without their last event
        self._told: dict[tuple[str, int], _ReplySoFar] = {}
        self._whose: dict[str, str] = {}  # of requests that go on with one reply alone: the client's request

    @property
    def is_finished(self) -> bool:
        """Whether the last event of every reply has been handed out."""
        return not self._open and not self._arrived

    def awaits(self, request_id: str) -> bool:
        """Whether a reply to this request has not had its last event yet."""
        return request_id in self._open

    async def events(self) -> list[NewTokens | Embedding]:
        """Wait for the next events of this call: what came since the last time. Raises what it failed with."""
        while not self._arrived:
            if self._error is not None:
                raise self._error
            assert self._open, "the call is finished"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        arrived, self._arrived = self._arrived, []
        return arrived

    def stop_reply(self, request_id: str, reply_index: int) -> None:
        """Let one reply end here; its last event still comes, with its timings."""
        self._told[request_id, reply_index].is_stopped = True
        alone = _alone(request_id, reply_index)
        self._client.send(Abort(alone if alone in self._whose else request_id, reply_index))

    def close(self) -> None:
        """Abort what still runs and expect nothing more. Closing twice is closing once."""
        unfinished, self._open = self._open, {}
        self._client.forget(unfinished)

    def deliver(self, event: NewTokens | Embedding) -> None:
        """Take in an event; the client's reader calls this on the event loop."""
        if isinstance(event, Embedding) or event.finish_reason is not None:
            left = self._open[event.request_id]
            left.discard(0 if isinstance(event, Embedding) else event.reply_index)
            if not left:
                del self._open[event.request_id]
        self._arrived.append(self._note(event) if isinstance(event, NewTokens) else event)
        self._wake()

    def resume_commands(self) -> list[Generate | Embed]:
        """Return what another process is to be asked, now that the one that had this call has died.

        Of what has said nothing yet, all; of a reply that has begun, what is missing. ``Generate.resume_token_ids``
        makes that the very tokens that the first process would have made.
        """
        commands: list[Generate | Embed] = []
        for request_id in list(self._open):
            whose = self._whose.get(request_id, request_id)
            command = self._commands[whose]
            if isinstance(command, Embed) or not any((whose, index) in self._told for index in range(command.n)):
                commands.append(command)
                continue
            for index in sorted(self._open.pop(request_id)):
                told = self._told.setdefault((whose, index), _ReplySoFar())
                if told.is_stopped:
                    self._end(whose, index, told)
                    continue
                told.is_resumed, told.gpu_seconds_before = True, told.gpu_seconds
                alone = _alone(whose, index)
                self._whose[alone], self._open[alone] = whose, {index}
                known = command.resume_token_ids + tuple(told.token_ids)
                commands.append(replace(command, request_id=alone, n=1, first_reply=index, resume_token_ids=known))
        return commands

    def fail(self, error: EngineFailed | Overloaded) -> None:
        """Let the waiting caller hear of ``error``."""
        self._open = {}
        self._error = error
        self._wake()

    def _note(self, event: NewTokens) -> NewTokens:
        """Remember what is told of a reply; of a resumed one, tell it as if nothing had happened."""
        whose = self._whose.get(event.request_id, event.request_id)
        told = self._told.get((whose, event.reply_index))
        if told is None:
            told = self._told[whose, event.reply_index] = _ReplySoFar()
        if not told.token_ids:
            told.cached_tokens = event.cached_tokens
        if told.is_resumed:
            timings, before = event.timings, told.gpu_seconds_before
            event = replace(
                event,
                request_id=whose,
                cached_tokens=told.cached_tokens,
                gpu_seconds=event.gpu_seconds + before,
                timings=timings and replace(timings, gpu_seconds=timings.gpu_seconds + before),
            )
        told.token_ids += event.token_ids
        told.gpu_seconds = event.gpu_seconds
        return event

    def _end(self, request_id: str, index: int, told: _ReplySoFar) -> None:
        """Give a reply whose text has ended the last event that the dead process owes it."""
        timings = Timings(0.0, 0.0, 0.0, told.gpu_seconds)
        self._arrived.append(
            NewTokens(
                request_id,
                index,
                (),
                finish_reason=FinishReason.ABORT,
                cached_tokens=told.cached_tokens,
                gpu_seconds=told.gpu_seconds,
                timings=timings,
            )
        )
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _alone(request_id: str, index: int) -> str:
    """Return the name of a request that goes on with one reply of another."""
    return f"{request_id}~{index}"


def _replies(command: Generate | Embed) -> set[int]:
    return set(range(command.n)) if isinstance(command, Generate) else {0}
