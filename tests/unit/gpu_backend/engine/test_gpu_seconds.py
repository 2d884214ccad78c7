# Whose device time it was: every step's time is shared out whole, whatever becomes of those who had a part in it.

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_backend.engine.loop import FAILURES_IN_A_ROW, EngineLoop
from gpu_backend.step.config import engine_config
from gpu_backend.step.limits import Limits
from gpu_backend.step.messages import Abort, Embed, Embedding, Event, NewTokens
from gpu_backend.step.plan import StepPlan, StepResult
from tests.support.engine import CountingRunner, answer_all, counting_loop, greedy


class UnreliableRunner(CountingRunner):
    """Takes a different time for every step, by a clock of its own; now and then it raises, or spoils a sequence."""

    def __init__(self, block_size: int, seed: int) -> None:
        super().__init__(block_size)
        self.now = 0.0
        self.spent = 0.0  # seconds in steps
        self._dice = random.Random(seed)
        self._failures = 0

    def clock(self) -> float:
        """Return the seconds that have passed; only steps take time."""
        return self.now

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step, or fail it."""
        seconds = self._dice.uniform(1e-4, 0.2)
        self.now += seconds
        self.spent += seconds
        if self._failures < FAILURES_IN_A_ROW - 1 and self._dice.random() < 0.1:
            self._failures += 1
            raise RuntimeError("out of memory")
        self._failures = 0
        result = super().run(plan)
        outputs = tuple([replace(output, has_failed=self._dice.random() < 0.03) for output in result.outputs])
        return replace(result, seconds=seconds, outputs=outputs)


requests = st.tuples(
    st.integers(1, 30),  # prompt length
    st.integers(0, 2),  # which of three prompt families, so that prefixes are found again
    st.integers(1, 14),  # max_tokens
    st.integers(1, 3),  # n
    st.booleans(),  # an embedding instead
)
moves = st.lists(st.one_of(requests, st.integers(0, 12), st.just("step")), max_size=60)


@settings(max_examples=75, deadline=None)
@given(moves, st.integers(12, 30), st.integers(1, 5), st.integers(0, 20), st.integers(0, 2**32))
def test_the_parts_of_all_sequences_are_the_time_of_all_steps(
    script: list[object], num_blocks: int, max_num_seqs: int, spare: int, seed: int
) -> None:
    """Ended, aborted, preempted, failed, embedded: what each is told adds up to the engine's busy seconds."""
    runner = UnreliableRunner(4, seed)
    config = engine_config(
        model="", block_size=4, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs + spare
    )
    loop = EngineLoop(config, runner, num_blocks, Limits(44, vocab_size=256), clock=runner.clock)
    told: list[float] = []
    for number, move in enumerate(script):
        match move:
            case (int(length), int(family), _, _, True):
                loop.handle(Embed(str(number), tuple(range(family * 50, family * 50 + length))))
            case (int(length), int(family), int(max_tokens), int(n), False):
                loop.handle(greedy(str(number), range(family * 50, family * 50 + length), max_tokens, n=n))
            case int():
                told += seconds_told(loop.handle(Abort(str(move))))
            case _ if loop.has_work():
                told += seconds_told(loop.step())
        assert loop.load().gpu_busy_seconds == pytest.approx(runner.spent, abs=1e-9)
    while loop.has_work():
        told += seconds_told(loop.step())

    assert math.fsum(told) == pytest.approx(runner.spent, abs=1e-9)


def seconds_told(events: list[Event]) -> list[float]:
    """Return what the last events of replies and embeddings say."""
    return [e.timings.gpu_seconds for e in events if isinstance(e, NewTokens | Embedding) and e.timings is not None]


def test_the_time_of_all_devices_is_told() -> None:
    """What four compute together for a second is four GPU seconds; they were busy for one."""
    config = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    loop, _ = counting_loop(64, block_size=4, max_num_seqs=2, max_num_batched_tokens=64, **config)
    told = [answer.events[-1].timings for answer in answer_all(loop, [greedy("a", range(9), 3, n=2)]).values()]

    assert sum(t.gpu_seconds for t in told if t is not None) == pytest.approx(4 * loop.load().gpu_busy_seconds)


def test_tokens_found_in_the_cache_cost_nothing() -> None:
    """The second reader of a prompt pays for what is computed: the last block of it, and its own tokens."""
    loop, _ = counting_loop(64, block_size=4, max_num_seqs=2, max_num_batched_tokens=64)
    prompt = range(17)
    (first,) = answer_all(loop, [greedy("first", prompt, 1)]).values()
    loop.handle(greedy("neighbour", range(100, 109), 1))

    (second, neighbour) = answer_all(loop, [greedy("second", prompt, 1)]).values()

    timings = [answer.events[-1].timings for answer in (first, second, neighbour)]
    seconds = sorted(t.gpu_seconds for t in timings if t is not None)
    assert second.events[-1].cached_tokens + neighbour.events[-1].cached_tokens == 16
    assert seconds == pytest.approx([0.001 * 1 / 10, 0.001 * 9 / 10, 0.001])


def test_a_reply_tells_its_time_as_it_goes() -> None:
    """Whoever leaves early has heard what was spent until then; the last word is the whole."""
    loop, _ = counting_loop(16, block_size=4)

    (answer,) = answer_all(loop, [greedy("x", range(5), 4)]).values()

    assert [event.gpu_seconds for event in answer.events] == pytest.approx([0.001, 0.002, 0.003, 0.004])
    assert answer.events[-1].timings is not None
    assert answer.events[-1].timings.gpu_seconds == answer.events[-1].gpu_seconds
