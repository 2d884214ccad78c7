# Sends the engine's process to sleep and wakes it. Commands are numbered, so that each caller hears of its own.

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gpu_backend.step.messages import Sleep, SleepAnswer, WakeUp
from protocol.errors import Overloaded


class SleepSwitch:
    """Whether the process is to sleep, and who waits to hear that it does, or does not."""

    def __init__(self, send: Callable[[Sleep | WakeUp], None]) -> None:
        self.is_on = False
        self._send = send
        self._number = 0
        self._asked: dict[int, asyncio.Future[str | None]] = {}

    async def turn(self, is_on: bool) -> None:
        """Have the process sleep, or wake. Raises ``Overloaded`` with what keeps it from that."""
        self.is_on = is_on
        self._number += 1
        answer = self._asked[self._number] = asyncio.get_running_loop().create_future()
        self._send(Sleep(self._number) if is_on else WakeUp(self._number))
        if (problem := await answer) is not None:
            raise Overloaded(f"The engine cannot {'sleep' if is_on else 'wake up'}: {problem}.", retry_after=5)

    def answer(self, said: SleepAnswer) -> None:
        """Tell all who asked by then: the last command took the place of those before it, which had no answer. Where
        the last of all was refused, the switch stays as it was."""
        for number in [number for number in self._asked if number <= said.number]:
            if not (waiting := self._asked.pop(number)).done():
                waiting.set_result(said.problem)
        if said.number == self._number and said.problem is not None:
            self.is_on = not self.is_on

    @property
    def is_waiting(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._asked)

    def begin_anew(self) -> None:
        """Tell a new process, which is awake, what the last one was told."""
        if self.is_on:
            self._number += 1  # it may have heard the last one, too, and its answer would count twice
            self._send(Sleep(self._number))
        else:
            self.answer(SleepAnswer(self._number))

    def fail(self) -> None:
        """There will be no process any more."""
        self.answer(SleepAnswer(self._number, "its process died"))
