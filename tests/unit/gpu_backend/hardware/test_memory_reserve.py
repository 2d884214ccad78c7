# What is left free for a step is enough for it: tensors are followed from birth to death through the hardest steps.

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpu_backend.execution.runner import Runner
from gpu_backend.hardware.capacity import ROWS_TO_SCORE, memory_reserve_bytes
from gpu_backend.models.config.model import load_model_config
from gpu_backend.sampling.sampler import report_logprobs, sample
from gpu_backend.step.config import engine_config
from gpu_backend.step.plan import SequenceStep, StepPlan
from gpu_backend.step.sampling_params import SamplingParams
from gpu_backend.step.step_tensors import build_tensors
from tests.support.tiny_model import TinyModel, write_tiny_model

GREEDY = SamplingParams(1, temperature=0.0)
ALL = SamplingParams(
    1, temperature=0.0, logprobs=5, repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.5,
    logit_bias=((1, 0.5),),
)  # fmt: skip


class Following(TorchDispatchMode):
    """Adds up the bytes of the tensors that live, and keeps the most there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._living: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        self._living = {key: each for key, each in self._living.items() if not each[0].expired()}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and (storage := leaf.untyped_storage())._cdata not in known:
                self._living[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(size for _, size in self._living.values()))
        return result


def most_bytes(runner: Runner, steps: list[SequenceStep], scored: bool = False) -> int:
    """Return the most bytes that tensors have at once while a step is computed and its tokens are chosen."""
    with torch.inference_mode(), Following() as following:
        batch = build_tensors(StepPlan(0, tuple(steps)), runner._grouping, runner.device)
        hidden = runner._model.hidden_states(batch, runner.kv_cache)
        if scored:
            targets = torch.zeros(len(hidden), dtype=torch.long)
            for rows, own in zip(hidden.split(ROWS_TO_SCORE), targets.split(ROWS_TO_SCORE), strict=True):
                report_logprobs(runner._model.logits(rows), own, [5] * len(own))
        runner._counts.update(steps, runner._device_state.last_tokens)
        rows = hidden if batch.sample_rows is None else hidden[batch.sample_rows]
        sample(runner._model.logits(rows), steps, runner._counts)
    return following.most


@pytest.mark.parametrize(
    ("vocab", "inner", "seqs", "tokens", "scored", "architecture"),
    [
        (8_000, 64, 32, 32, False, "LlamaForCausalLM"),
        (256, 4096, 4, 256, False, "LlamaForCausalLM"),
        (20_000, 64, 4, 256, True, "LlamaForCausalLM"),
        (256, 64, 4, 256, False, "YoutuForCausalLM"),
    ],
    ids=["all adjustments", "a chunk of prompts", "scores of a prompt", "latent vectors"],
)
def test_no_step_takes_more_than_is_left_for_it(
    vocab: int, inner: int, seqs: int, tokens: int, scored: bool, architecture: str, tmp_path: Path
) -> None:
    """With every row penalised, reported and drawn; nor is very much more left than is ever taken."""
    model = TinyModel(architecture, vocab_size=vocab, intermediate_size=inner, num_layers=1)
    model = replace(model, num_heads=32) if architecture.startswith("Youtu") else model
    folder = write_tiny_model(tmp_path, model)
    settings: dict[str, Any] = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens, "max_model_len": 128}
    config = engine_config(str(folder), device="cpu", **settings)
    runner = Runner(config, load_model_config(folder))
    length = tokens // seqs
    said = array("i", range(40)).tobytes()
    steps = [
        SequenceStep(
            i, (7,) * length, 0, tuple(range(4 * i, 4 * i + 4)), True, GREEDY if scored else ALL, 0,
            num_prompt=20, row=i, text=said,
        )
        for i in range(seqs)
    ]  # fmt: skip

    most, left = most_bytes(runner, steps, scored), memory_reserve_bytes(config, runner.model_config, 4, 128)

    assert left / 4 < most <= left


def test_drafts_are_rows_too() -> None:
    """Each has logits of its own."""
    model = load_model_config(Path(__file__).parents[4] / "gpu_backend/demo_model/checkpoint")
    plain, drafting = (
        memory_reserve_bytes(engine_config("m", max_num_seqs=256, **more), model, 2, 1024)
        for more in ({}, {"speculative_method": "ngram", "num_speculative_tokens": 3})
    )

    assert drafting - plain == 3 * 256 * model.vocab_size * 48


def test_parts_of_a_long_context_have_room() -> None:
    """A chunk of 2,048 tokens at a context of 128 K is computed in sixteen parts, each with float32 of its own."""
    model = load_model_config(Path(__file__).parents[4] / "gpu_backend/demo_model/checkpoint")
    config = engine_config("m", max_num_batched_tokens=2048)

    short, long = (memory_reserve_bytes(config, model, 2, length) for length in (8192, 131_072))

    assert long - short == 16 * 2048 * model.num_heads * (model.head_dim + 1) * 4
