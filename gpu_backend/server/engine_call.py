# One client's business with the engine: the commands it sent and the events that answer them.

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from gpu_backend.engine.messages import Abort, Command, Embed, Embedding, Generate, NewTokens
from gpu_backend.server.errors import EngineFailed, Overloaded


class Client(Protocol):
    """What a call asks of the ``EngineClient`` that made it."""

    def send(self, command: Command) -> None: ...

    def forget(self, request_ids: Iterable[str]) -> None: ...


class EngineCall:
    """One client's commands and the events that answer them. Close it, whatever happens: unfinished work is aborted."""

    def __init__(self, client: Client, commands: Sequence[Generate | Embed]) -> None:
        self._client = client
        self._arrived: list[NewTokens | Embedding] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: EngineFailed | Overloaded | None = None
        self._open = {command.request_id: _replies(command) for command in commands}  # replies without their last event

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
        self._client.send(Abort(request_id, reply_index))

    def close(self) -> None:
        """Abort what still runs and expect nothing more. Closing twice is closing once."""
        unfinished, self._open = self._open, {}
        self._client.forget(unfinished)

    def deliver(self, event: NewTokens | Embedding) -> None:
        """Take in an event; the client's reader calls this on the event loop."""
        self._arrived.append(event)
        if isinstance(event, Embedding) or event.finish_reason is not None:
            left = self._open[event.request_id]
            left.discard(0 if isinstance(event, Embedding) else event.reply_index)
            if not left:
                del self._open[event.request_id]
        self._wake()

    def fail(self, error: EngineFailed | Overloaded) -> None:
        """Let whoever waits hear of ``error``."""
        self._open = {}
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _replies(command: Generate | Embed) -> set[int]:
    return set(range(command.n)) if isinstance(command, Generate) else {0}
