# `--batch-invariant`: what a sequence gets is the same to the bit alone and in any company. Shown here in plain torch;
# tests/gpu shows it of the kernels.

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_backend.step.messages import Generate
from gpu_backend.step.sampling_params import SamplingParams
from tests.support.engine import answer_all, expect_short_replies, model_loop
from tests.support.tiny_model import TinyModel, write_tiny_model

WISH = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.95, logprobs=3)
COMMANDS = [
    Generate(str(i), tuple((7 * i + j * j) % 256 for j in range(length)), replace(WISH, seed=i))
    for i, length in enumerate((1, 15, 14, 33))
]


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_reply_is_the_same_to_the_bit_in_any_company(tmp_path: Path, quantization: str | None) -> None:
    """Tokens and all their log-probabilities are equal alone, side by side, in chunks of any size, and preempted."""
    folder = write_tiny_model(tmp_path, TinyModel("Qwen3ForCausalLM", hidden_size=96, intermediate_size=160))
    engine = {"num_kv_blocks": 200, "max_num_seqs": 4, "quantization": quantization, "batch_invariant": True}
    alone: dict[Any, Any] = {}
    for command in COMMANDS:
        alone |= _replies(folder, [command], max_num_batched_tokens=512, **engine)

    together = _replies(folder, COMMANDS, max_num_batched_tokens=512, **engine)
    in_chunks = _replies(folder, COMMANDS, max_num_batched_tokens=19, **engine)
    preempted = _replies(folder, COMMANDS, max_num_batched_tokens=32, **(engine | {"num_kv_blocks": 7}))

    assert together == in_chunks == preempted == alone


def test_without_it_company_shows_in_the_last_bits(tmp_path: Path) -> None:
    """The rule above is not kept by chance: a library's sums do depend on the batch."""
    folder = write_tiny_model(tmp_path, TinyModel("Qwen3ForCausalLM", hidden_size=96, intermediate_size=160))

    together = _replies(folder, COMMANDS, max_num_batched_tokens=512, max_num_seqs=4)

    assert any(_replies(folder, [command], max_num_batched_tokens=19, max_num_seqs=4).items() - together.items()
               for command in COMMANDS)  # fmt: skip


def _replies(folder: Path, commands: list[Generate], **settings: Any) -> dict[Any, Any]:
    """Return each reply's tokens and log-probabilities, by its request."""
    loop = model_loop(folder, **settings)
    expect_short_replies(loop)
    answers = answer_all(loop, commands)
    assert (loop.scheduler.running.num_preempted > 0) == (settings.get("num_kv_blocks") == 7)
    return {
        key: (tuple(answer.token_ids), tuple(event.logprobs for event in answer.events))
        for key, answer in answers.items()
    }
