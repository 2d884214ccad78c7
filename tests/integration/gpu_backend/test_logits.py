# Logits against transformers, for configurations drawn by chance: every architecture, with what its configs may say.

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_backend.kernels.layout.grouping import Grouping
from gpu_backend.models.config import ARCHITECTURES, load_model_config
from gpu_backend.models.registry import load_model
from gpu_backend.models.weights import Checkpoint
from gpu_backend.step.plan import SequenceStep, StepPlan
from gpu_backend.step.sampling_params import SamplingParams
from gpu_backend.step.step_tensors import build_tensors
from tests.support.tiny_model import TinyModel, write_tiny_model

CPU = torch.device("cpu")
BLOCK = 16
TOLERANCE = 1e-4  # of the largest logit; float32 on both sides
ROPES: tuple[dict[str, Any], ...] = (
    {},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 2.5, "beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 0.9},
)


def draw(architecture: str, seed: int, dice: random.Random) -> TinyModel:
    """Draw a configuration: each rope and each number of key heads once or more, the rest by chance.

    Ropes other than the plain, the linear and the dynamic one name their trained length.
    """
    kv_heads = 1 + seed % 3
    layers = dice.randint(1, 3)
    rope = dict(ROPES[seed])
    if rope.get("rope_type") in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = dice.choice([32, 64, 128])
    extra: dict[str, Any] = {"rope_theta": dice.choice([1e4, 5e5, 1e6]), "rms_norm_eps": dice.choice([1e-5, 1e-6])}
    extra |= {"rope_scaling": rope} if rope else {}
    if architecture == "MistralForCausalLM":
        extra["sliding_window"] = dice.choice([None, 7, 16, 50])
    elif architecture.startswith("Qwen"):
        extra |= {
            "use_sliding_window": dice.random() < 0.5,
            "sliding_window": 24,
            "max_window_layers": dice.randint(0, 3),
        }
    return TinyModel(
        architecture,
        hidden_size=dice.choice([48, 96]),
        intermediate_size=dice.choice([40, 96]),
        num_layers=layers,
        num_heads=kv_heads * dice.choice([1, 2, 4]),
        num_kv_heads=kv_heads,
        head_dim=dice.choice([8, 16, 24]),
        tie_word_embeddings=dice.random() < 0.5,
        attention_bias=architecture == "LlamaForCausalLM" and dice.random() < 0.5,
        seed=dice.randrange(1000),
        extra=extra,
    )


def our_logits(folder: Path, token_ids: list[int], cut: int) -> Tensor:
    """Return the logits after each token, computed in two chunks through blocks in no order."""
    config = load_model_config(folder)
    num_blocks = -(-len(token_ids) // BLOCK)
    order = random.Random(1).sample(range(num_blocks), num_blocks)
    grouping = Grouping(BLOCK, num_blocks, 512, CPU, torch.float32, max(config.windows))
    with torch.inference_mode():
        model = load_model(config, Checkpoint(folder, CPU, torch.float32), 512)
        cache = torch.zeros(config.num_layers, num_blocks + 1, BLOCK, 2, config.num_kv_heads, config.head_dim)
        rows = []
        for start, end in ((0, cut), (cut, len(token_ids))):
            table = tuple(order[: -(-end // BLOCK)])
            step = SequenceStep(0, tuple(token_ids[start:end]), start, table, True, SamplingParams(1), 0)
            batch = build_tensors(StepPlan(0, (step,)), grouping, CPU)
            rows.append(model.logits(model.hidden_states(batch, cache)))
        return torch.cat(rows)


@pytest.mark.parametrize("seed", range(len(ROPES)))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_transformers(architecture: str, seed: int, tmp_path: Path) -> None:
    """Within a ten-thousandth of the largest logit, at every position, and the same choice wherever it is clear."""
    from transformers import AutoModelForCausalLM

    dice = random.Random(f"{architecture} {seed}")
    model = draw(architecture, seed, dice)
    folder = write_tiny_model(tmp_path, model)
    token_ids = [dice.randrange(256) for _ in range(dice.randint(90, 150))]

    with torch.no_grad():
        oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        expected: Tensor = oracle(torch.tensor([token_ids])).logits[0]
    ours = our_logits(folder, token_ids, dice.randint(1, len(token_ids) - 1))

    largest = expected.abs().max()
    assert (ours - expected).abs().max() <= TOLERANCE * largest, model
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2 * TOLERANCE * largest
    assert torch.equal(ours.argmax(-1)[clear], expected.argmax(-1)[clear])
    assert clear.float().mean() > 0.9
