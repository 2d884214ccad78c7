# `python -m gpu_backend` with its own flags, and a script in place of the process that computes: every reply is as long
# as it may be, a token each PACE seconds. All else is an engine's: front, heartbeats, drain. No torch is loaded.

from __future__ import annotations

import heapq
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count

import gpu_backend.server.serving as serving
from gpu_backend.__main__ import main
from gpu_backend.step.messages import Command, Event, FinishReason, Generate, NewTokens
from tests.support.fake_engine import TIMINGS, FakeEngine, silent

PACE = 0.03  # seconds
LETTER = 70  # the token of every place


class Pacer:
    """Says what is due, in a thread of its own."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._has_more = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def at(self, moment: float, say: Callable[[], None]) -> None:
        """Call ``say`` at a moment (monotonic seconds)."""
        with self._has_more:
            heapq.heappush(self._due, (moment, next(self._numbers), say))
            self._has_more.notify()

    def _run(self) -> None:
        while True:
            with self._has_more:
                while not self._due or (left := self._due[0][0] - time.monotonic()) > 0:
                    self._has_more.wait(left if self._due else None)
                _, _, say = heapq.heappop(self._due)
            say()


def answer(engine: FakeEngine, pacer: Pacer, command: Command) -> list[tuple[Event, ...]]:
    """Answer a command over time."""
    if not isinstance(command, Generate):
        return silent(command)
    began, length = time.monotonic(), command.sampling.max_tokens - len(command.resume_token_ids)
    for number in range(1, length + 1):
        ends = {"finish_reason": FinishReason.LENGTH, "timings": TIMINGS} if number == length else {}
        said = NewTokens(command.request_id, command.first_reply, (LETTER,), **ends)  # type: ignore[arg-type]
        pacer.at(began + number * PACE, partial(engine.process.say, said))
    return []


if __name__ == "__main__":
    engine = FakeEngine(max_model_len=512)
    engine.script = partial(answer, engine, Pacer())
    serving.EngineClient = partial(serving.EngineClient, start_process=engine.start)  # type: ignore[misc, assignment]
    sys.exit(main())
