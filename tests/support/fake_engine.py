# An engine process made of a script, for tests of the HTTP front alone: it records commands and says what it is told.

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import replace

from gpu_backend.step.config import EngineConfig
from gpu_backend.step.cost import StepCost
from gpu_backend.step.messages import (
    Abort,
    Command,
    Embed,
    Embedding,
    Event,
    FinishReason,
    Generate,
    NewTokens,
    Ready,
    Timings,
)

TIMINGS = Timings(queue_ms=1.0, prefill_ms=2.0, decode_ms=3.0, gpu_seconds=0.25, first_token_steps=2)
COST = StepCost(fixed=0.001, weights=0.01, token=0.0001, context=1e-7, pair=0.0)
READY = Ready(total_blocks=8, block_size=16, max_model_len=64, device="cpu", dtype="float32", step_cost=COST)

Script = Callable[[Command], list[tuple[Event, ...]]]  # a command's answers, each one step's events


class FakeProcess:
    """One engine process. ``script`` answers commands; ``say`` and ``die`` do what no command asks for."""

    def __init__(self, script: Script, ready: Ready | None = READY) -> None:
        self.commands: list[Command] = []
        self.is_stopped = False
        self._script = script
        self._outbox: queue.SimpleQueue[tuple[Event, ...] | None] = queue.SimpleQueue()
        self._heard = threading.Condition()
        if ready is not None:
            self.say(ready)

    def send(self, command: Command) -> None:
        """Take a command and answer it by the script."""
        for events in self._script(command):
            self._outbox.put(events)
        with self._heard:
            self.commands.append(command)
            self._heard.notify_all()

    def receive(self) -> tuple[Event, ...]:
        """Return the next step's events."""
        events = self._outbox.get()
        if events is None:
            raise EOFError
        return events

    def stop(self, timeout: float = 5.0) -> None:
        """End the process."""
        self.is_stopped = True
        self._outbox.put(None)

    def say(self, *events: Event) -> None:
        """Send events as one step would."""
        self._outbox.put(events)

    def die(self) -> None:
        """End without being asked."""
        self._outbox.put(None)

    def wait_for(self, is_it: Callable[[Command], bool]) -> Command:
        """Wait until a command was sent for which ``is_it`` holds, and return it."""
        with self._heard:
            assert self._heard.wait_for(lambda: any(map(is_it, self.commands)), timeout=5), self.commands
            return next(command for command in self.commands if is_it(command))


class FakeEngine:
    """Starts fake processes, one after the other, all with the same script."""

    def __init__(self, script: Script | None = None, is_ready: bool = True, max_model_len: int = 64) -> None:
        self.processes: list[FakeProcess] = []
        self.configs: list[EngineConfig] = []  # of each process
        self.script = script or silent
        self.is_ready = is_ready
        self.max_model_len = max_model_len

    def start(self, config: EngineConfig) -> FakeProcess:
        """Stand in for ``EngineProcess.start``."""
        self.configs.append(config)
        ready = replace(READY, max_model_len=self.max_model_len) if self.is_ready else None
        self.processes.append(FakeProcess(lambda command: self.script(command), ready))
        return self.processes[-1]

    @property
    def process(self) -> FakeProcess:
        """The process that runs now."""
        return self.processes[-1]


def silent(command: Command) -> list[tuple[Event, ...]]:
    """Answer nothing but aborts, as an engine that is busy with a long prompt."""
    if isinstance(command, Abort):
        index = command.reply_index or 0
        return [(NewTokens(command.request_id, index, (), finish_reason=FinishReason.ABORT, timings=TIMINGS),)]
    return []


def speaking(tokens: list[int], finish: FinishReason = FinishReason.LENGTH, chunk: int = 1) -> Script:
    """Return a script: every reply is ``tokens``, ``chunk`` of them a step, and every embedding is (1, 0)."""

    def script(command: Command) -> list[tuple[Event, ...]]:
        match command:
            case Embed(request_id=request_id):
                return [(Embedding(request_id, (1.0, 0.0), TIMINGS),)]
            case Generate(request_id=request_id, n=n):
                return [(event,) for index in range(n) for event in _steps(request_id, index, tokens, finish, chunk)]
        return silent(command)

    return script


def _steps(request_id: str, index: int, tokens: list[int], finish: FinishReason, chunk: int) -> list[NewTokens]:
    events = []
    for start in range(0, len(tokens), chunk):
        is_last = start + chunk >= len(tokens)
        events.append(
            NewTokens(
                request_id,
                index,
                tuple(tokens[start : start + chunk]),
                finish_reason=finish if is_last else None,
                timings=TIMINGS if is_last else None,
            )
        )
    return events
