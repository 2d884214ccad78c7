# `python -m gpu_backend` with its own flags, and a script in place of the process that computes: every reply is as long
# as it may be, a token each PACE seconds, and the beginnings of the last prompts are cached. All else is an engine's:
# front, heartbeats, KV events, drain. No torch is loaded. What becomes of its KV events a file says, and another one
# what there is to tell.

from __future__ import annotations

import heapq
import random
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import gpu_backend.server.serving as serving
from gateway.placing.placer import INSTANCE_ID
from gpu_backend.__main__ import main
from gpu_backend.server.client.kv_publisher import KvPublisher
from gpu_backend.step.block_events import BlockRemoved, BlockStored
from gpu_backend.step.config import KvEventsConfig
from gpu_backend.step.messages import BlocksChanged, Command, Event, FinishReason, Generate, NewTokens
from tests.support.fake_engine import TIMINGS, FakeEngine, silent

PACE = 0.03  # seconds
LETTER = 70  # the token of every place
MOST_CACHED, LEAST_KEPT = 24, 8  # beginnings of prompts
KV_FAULT, KV_TRUTH = (
    "kv-fault",
    "kv-truth",
)  # files beside the model's; the second has the replica's name, too


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


class Cache:
    """The beginnings of prompts that were asked last, each in a block of its own."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._dice = random.Random(5)

    def use(self, marks: tuple[tuple[int, int], ...]) -> BlocksChanged:
        """Let a prompt's be the newest; return what that changed."""
        fresh = [mark for mark, _ in marks if mark not in self._blocks]
        for mark, _ in marks:
            self._blocks[mark] = None
            self._blocks.move_to_end(mark)
        too_many = len(self._blocks) - self._dice.randrange(LEAST_KEPT, MOST_CACHED)
        gone = [self._blocks.popitem(last=False)[0] for _ in range(too_many if len(self._blocks) > MOST_CACHED else 0)]
        told: list[Any] = [BlockStored([], None, [], 16, "GPU", [], prompt_marks=[(mark, mark)]) for mark in fresh]
        return BlocksChanged((*told, *([BlockRemoved(gone, "GPU")] if gone else ())))

    def __len__(self) -> int:
        return len(self._blocks)


class UnsurePublisher(KvPublisher):
    """Loses events, changes their order, and does not answer, as a file says in words."""

    def __init__(self, folder: Path, config: KvEventsConfig) -> None:
        super().__init__(config)
        self._fault, self._dice, self._kept = folder / KV_FAULT, random.Random(7), list[Any]()
        self._send_event, self._events = self._events.send_multipart, self  # type: ignore[assignment]

    def send_multipart(self, parts: Any) -> None:
        """Send an event, or not; or the one before after it."""
        said = self._said()
        if "lose" in said and self._dice.random() < 0.3:
            return
        if "reorder" in said and self._dice.random() < 0.3:
            self._kept.append(parts)
            return
        for each in (parts, *self._kept):
            self._send_event(each)
        self._kept.clear()

    def _replay(self, asked: list[bytes]) -> None:
        said = self._said()
        if "silent" in said:
            return
        if "late" in said:
            time.sleep(0.5)
        kept = list(self._sent)
        if "short" in said:
            self._sent.clear()
        super()._replay(asked)
        if "short" in said:
            self._sent.extend(kept)

    def _said(self) -> str:
        return self._fault.read_text() if self._fault.exists() else ""


def answer(engine: FakeEngine, pacer: Pacer, cache: Cache, truth: Path, command: Command) -> list[tuple[Event, ...]]:
    """Answer a command over time."""
    if not isinstance(command, Generate):
        return silent(command)
    engine.process.say(cache.use(command.prompt_marks))
    truth.write_text(str(len(cache)))
    began, length = time.monotonic(), command.sampling.max_tokens - len(command.resume_token_ids)
    for number in range(1, length + 1):
        ends = {"finish_reason": FinishReason.LENGTH, "timings": TIMINGS} if number == length else {}
        said = NewTokens(command.request_id, command.first_reply, (LETTER,), **ends)  # type: ignore[arg-type]
        pacer.at(began + number * PACE, partial(engine.process.say, said))
    return []


if __name__ == "__main__":
    folder = Path(sys.argv[sys.argv.index("--model") + 1]).parent
    truth = folder / f"{KV_TRUTH}-{sys.argv[sys.argv.index(INSTANCE_ID) + 1]}"
    truth.write_text("0")
    engine = FakeEngine(max_model_len=4096)
    engine.script = partial(answer, engine, Pacer(), Cache(), truth)
    serving.EngineClient = partial(serving.EngineClient, start_process=engine.start)  # type: ignore[misc, assignment]
    serving.KvPublisher = partial(UnsurePublisher, folder)  # type: ignore[misc, assignment]
    sys.exit(main())
