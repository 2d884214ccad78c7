# An engine that sleeps: it has given its memory back, and computes the same as before once it is woken.

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_backend.execution.runner import Runner
from gpu_backend.hardware.device_memory import DeviceMemory
from gpu_backend.models.shards import tensors_of
from gpu_backend.step.messages import FinishReason, Sleep, SleepAnswer, WakeUp
from tests.support.engine import Answer, answer_all, collect, finish, greedy, model_loop
from tests.support.kv_transfer import counting_engine, prefill, step, until
from tests.support.tiny_model import TinyModel, write_tiny_model

PROMPT = tuple(range(1, 31))
GRAPHS: dict[str, Any] = {"cuda_graphs": True, "async_scheduling": True}


def test_replies_that_run_end_and_those_after_a_sleep_are_the_same(tmp_path: Path) -> None:
    """Graphs, host memory and a draft model included. While it sleeps the KV cache takes no memory, and nothing is in
    the prefix cache; a request that arrives is refused."""
    folder = write_tiny_model(tmp_path, TinyModel())
    drafts = {"speculative_method": "draft", "speculative_model": str(folder), "num_speculative_tokens": 2}
    loop = model_loop(folder, num_kv_blocks=12, host_kv_bytes=500_000, **GRAPHS, **drafts)
    runner, answers = loop.runner, dict[tuple[str, int], Answer]()
    assert isinstance(runner, Runner) and runner.graphs is not None and runner._draft_model is not None

    collect(answers, loop.handle(greedy("a", PROMPT)))
    asked = loop.handle(Sleep(1))
    while not runner.graphs._graphs:
        collect(answers, loop.step())
    finish(loop, answers)
    asleep = runner.kv_cache.untyped_storage().nbytes(), runner._draft_model.kv_cache.untyped_storage().nbytes()
    graphs = dict(runner.graphs._graphs)
    (refused,) = loop.handle(greedy("b", PROMPT))
    woken = loop.handle(WakeUp(2))
    again = answer_all(loop, [greedy("a", PROMPT)])["a", 0]

    assert asked == [] and asleep == (0, 0) and graphs == {}
    assert refused.finish_reason is FinishReason.ERROR and "sleeps" in refused.error  # type: ignore[union-attr, operator]
    assert woken == [SleepAnswer(2)]
    assert again.token_ids == answers["a", 0].token_ids and len(again.token_ids) == 20
    assert again.events[0].cached_tokens == 0
    loop.scheduler.check()


def test_blocks_held_for_another_engine_are_given_up() -> None:
    """Its lease ends, and then the engine sleeps: what they hold can be computed elsewhere."""
    with counting_engine() as engine:
        prefill(engine.loop, greedy("a", PROMPT))
        held = engine.loop.blocks.num_in_use
        events = engine.loop.handle(Sleep(1))
        until(engine.loop.has_work)
        events += engine.loop.step()

    assert held == 7 and events == [SleepAnswer(1)]
    assert engine.loop.blocks.num_in_use == 0


def test_an_engine_that_is_woken_in_time_does_not_sleep() -> None:
    """The replies that it waited for go on, and are followed by others."""
    with counting_engine() as engine:
        answers: dict[tuple[str, int], Answer] = {}
        engine.loop.handle(greedy("a", PROMPT))
        engine.loop.handle(Sleep(1))
        step(engine.loop, answers)
        woken = engine.loop.handle(WakeUp(2))
        engine.loop.handle(greedy("b", PROMPT))
        finish(engine.loop, answers)

    assert woken == [SleepAnswer(2)]
    assert {name for name, _ in answers} == {"a", "b"}


def test_memory_that_another_has_meanwhile_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine says so, has none of it, and sleeps on until it is woken once more."""
    loop = model_loop(write_tiny_model(tmp_path, TinyModel()), num_kv_blocks=8)
    before = answer_all(loop, [greedy("a", PROMPT)])["a", 0].token_ids
    loop.handle(Sleep(1))
    with monkeypatch.context() as patched:
        patched.setattr(DeviceMemory, "restore", _no_room_for_all)
        (kept,) = loop.handle(WakeUp(2))
    left = loop.runner.kv_cache.untyped_storage().nbytes()  # type: ignore[attr-defined]
    (woken,) = loop.handle(WakeUp(3))

    assert kept == SleepAnswer(2, "its memory cannot be had again: no room") and left == 0
    assert woken == SleepAnswer(3)
    assert answer_all(loop, [greedy("b", PROMPT)])["b", 0].token_ids == before


def _no_room_for_all(memory: DeviceMemory, restore: Any = DeviceMemory.restore) -> None:
    restore(memory)
    raise RuntimeError("no room")


class _OtherRank:
    """One behind the first, which has a problem, or none."""

    problem: str | None = "no room"

    def __init__(self) -> None:
        self.told: list[Any] = []

    def tell(self, told: Any) -> None:
        self.told.append(told)

    def gather(self, value: Any) -> list[Any]:
        return [value, self.problem]


def test_ranks_sleep_all_or_none(tmp_path: Path) -> None:
    """What one of them cannot give, or take again, keeps the others from it: they go on as they were, and none ends."""
    runner = model_loop(write_tiny_model(tmp_path, TinyModel()), num_kv_blocks=8).runner
    assert isinstance(runner, Runner)
    other, storage = _OtherRank(), runner.kv_cache.untyped_storage()
    runner._ranks = other  # type: ignore[assignment]
    whole, sizes = storage.nbytes(), []

    for problem, change in ("no room", runner.sleep), (None, runner.sleep), ("no room", runner.wake_up):
        other.problem = problem
        with pytest.raises(RuntimeError, match="no room") if problem else nullcontext():
            change()
        sizes.append(storage.nbytes())
    runner._leads = False
    runner.wake_up()
    sizes.append(storage.nbytes())
    other.problem = None
    runner.wake_up()

    assert sizes == [whole, 0, 0, 0] and storage.nbytes() == whole
    assert other.told == [Sleep(0), Sleep(0), WakeUp(0)]


@torch.inference_mode()
def test_weights_come_back_as_they_were(tmp_path: Path) -> None:
    """As on a GPU, where they leave the device: every tensor of a model, and every view of one."""
    runner = model_loop(write_tiny_model(tmp_path, TinyModel()), num_kv_blocks=8, dtype="bfloat16").runner
    assert isinstance(runner, Runner)
    weights = [tensor for tensor in tensors_of(runner._model) if tensor.untyped_storage().resizable()]
    before, view = [tensor.clone() for tensor in weights], weights[0][1:]
    memory = DeviceMemory([*weights, view], [runner.kv_cache])

    freed = memory.release()
    left = [tensor.untyped_storage().nbytes() for tensor in [*weights, view, runner.kv_cache]]
    memory.restore()

    assert set(left) == {0} and freed > runner.kv_cache.nbytes
    assert all(torch.equal(tensor, old) for tensor, old in zip(weights, before, strict=True))
    assert torch.equal(view, before[0][1:]) and not runner.kv_cache.any()
