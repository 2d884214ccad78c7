# Layers of linear attention in an engine: what begins has a state of its own, what cannot go on from blocks alone is
# refused by name, and no step goes on from another's state.

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_backend.execution.runner import Runner
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import load_model_config, parse_model_config
from gpu_backend.models.shards import stage_of
from gpu_backend.step.config import engine_config
from gpu_backend.step.messages import Generate
from gpu_backend.step.plan import SequenceStep, StepPlan
from gpu_backend.step.sampling_params import SamplingParams
from tests.support.engine import GREEDY, Answer, collect, model_loop
from tests.support.tiny_model import TinyModel, write_tiny_model

TINY = TinyModel("Qwen3_5ForCausalLM")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("m"), TINY, with_tokenizer=True)


@pytest.mark.parametrize("more", [{}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8", "quantization": "fp8"}])
def test_a_reply_is_the_same_after_another_in_its_row(more: dict[str, Any], folder: Path) -> None:
    """A prompt of one token, which a graph may compute as a decode, begins with an empty state."""
    loop = model_loop(folder, cuda_graphs=True, max_num_seqs=1, num_kv_blocks=8, **more)
    answers: dict[tuple[str, int], Answer] = {}
    for name, prompt in (("first", (7,)), ("between", tuple(range(40))), ("again", (7,)), ("same", tuple(range(40)))):
        collect(answers, loop.handle(Generate(name, prompt, GREEDY)))
        while loop.has_work():
            collect(answers, loop.step())

    assert answers["first", 0].token_ids == answers["again", 0].token_ids
    assert len(answers["again", 0].token_ids) == GREEDY.max_tokens
    assert answers["between", 0].token_ids == answers["same", 0].token_ids
    assert answers["same", 0].events[0].cached_tokens == 0  # blocks that were full of it say nothing of its state


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"speculative_method": "ngram"}, "speculative_method"),
        ({"host_kv_bytes": 2**20}, "host_kv_bytes"),
        ({"kv_transfer_address": "127.0.0.1:0"}, "kv_transfer_address"),
        ({"batch_invariant": True, "allow_runtime_lora_updating": True}, "lora_updating, batch_invariant"),
        ({"quantization": "int8"}, r"quantization \(all but fp8\)"),
    ],
)
def test_what_needs_no_state_or_an_older_one_is_refused_by_name(
    asked: dict[str, Any], named: str, folder: Path
) -> None:
    """At the start, not where numbers would be wrong."""
    with pytest.raises(UnsupportedModel, match=named):
        Runner(engine_config(str(folder), device="cpu", **asked), load_model_config(folder))


def test_a_step_does_not_go_on_from_another_state(folder: Path) -> None:
    """The scheduler's fault is a failed step, never a reply with another's state in it."""
    runner = Runner(engine_config(str(folder), device="cpu", num_kv_blocks=4), load_model_config(folder))

    def plan(sequence: int, start: int) -> StepPlan:
        return StepPlan(0, (SequenceStep(sequence, (5,), start, (0,), True, SamplingParams(4), 0),))

    runner.run(plan(1, 0))
    runner.run(plan(1, 1))
    for wrong in (plan(1, 3), plan(2, 2)):
        with pytest.raises(RuntimeError, match="a state of 2 tokens is asked to go on from"):
            runner.run(wrong)


def test_layers_must_be_known_and_each_stage_must_keep_keys() -> None:
    """A config.json that would be read otherwise than transformers does is refused; so is a stage without a cache."""
    config = TINY.config()
    for kinds in (["full_attention"], ["linear_attention"] * 2, ["full_attention", "mamba"]):
        with pytest.raises(UnsupportedModel, match=r"layer_types is|no layer has full attention"):
            parse_model_config(config | {"layer_types": kinds})
    with pytest.raises(UnsupportedModel, match="stage 2 has linear attention alone"):
        stage_of(parse_model_config(config), 1, 2)
