# The bytes of KV blocks as other engines get them, and what tells that both mean the same by them.

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpu_backend.execution.block_store import KvBlockStore
from gpu_backend.execution.fingerprint import fingerprint_of
from gpu_backend.kernels.layout.quantized_kv import KvScales
from gpu_backend.models.config.rope import RopeConfig
from gpu_backend.models.rope import rope_table
from gpu_backend.step.config import engine_config
from tests.support.tiny_heads import write_eagle_head
from tests.support.tiny_model import TinyModel, write_tiny_model

SHAPE = (3, 8, 2, 2, 2, 4)  # layers, blocks, block_size, keys and values, heads, head_dim


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_blocks_come_as_they_are(dtype: torch.dtype) -> None:
    """Read from one cache and written to other places of another; nothing else there changes."""
    source = (torch.randn(SHAPE) * 100).to(dtype)
    goal = torch.zeros_like(source)

    data = KvBlockStore(source, "").read([5, 0, 2])
    KvBlockStore(goal, "").write([1, 7, 3], data, None)

    assert torch.equal(goal[:, [1, 7, 3]], source[:, [5, 0, 2]])
    assert not goal[:, [0, 2, 4, 5, 6]].any()
    assert len(data) == 3 * KvBlockStore(source, "").format.block_bytes


def test_only_equal_models_rounded_alike_have_one_fingerprint(tmp_path: Path) -> None:
    """Other weights of the same shape, another configuration, another way of rounding, and where a head reads what lies
    in the blocks, its weights and its configuration: each is another."""
    first = write_tiny_model(tmp_path / "first")
    same = write_tiny_model(tmp_path / "same")
    seed = write_tiny_model(tmp_path / "seed", TinyModel(seed=1))
    rope = write_tiny_model(tmp_path / "rope", TinyModel(extra={"rope_theta": 5000.0}))
    scales = (KvScales(torch.ones(2), torch.ones(2)),)
    config = engine_config(str(first))

    def of(folder: Path, **settings: str) -> str:
        return fingerprint_of(engine_config(str(folder), **settings), torch.float32, None, ())

    assert of(first) == of(same)
    others = [of(seed), of(rope), of(first, quantization="int8"), fingerprint_of(config, torch.bfloat16, None, ())]
    others += [fingerprint_of(config, torch.float32, scales, ())]
    others += [fingerprint_of(config, torch.float32, (replace(scales[0], key=torch.full((2,), 2.0)),), ())]
    heads = [
        write_eagle_head(tmp_path / f"head {number}", TinyModel(seed=seed), eagle_aux_hidden_state_layer_ids=layers)
        for number, (seed, layers) in enumerate(((0, [0, 1, 2]), (1, [0, 1, 2]), (0, [1, 2, 3])))
    ]
    others += [of(first, speculative_method="eagle3", speculative_model=str(head)) for head in heads]
    assert len({of(first), *others}) == 10


def test_longer_sequences_have_another_fingerprint_where_keys_turn_by_their_length(tmp_path: Path) -> None:
    """A longrope has one set of factors up to the original context, and another for engines that go beyond it."""
    config, factors = engine_config(str(write_tiny_model(tmp_path))), {"short_factors": (1.0,) * 4}
    long, plain = (
        RopeConfig(1e4, kind, original_max_position=64, **factors, long_factors=(4.0,) * 4)
        for kind in ("longrope", "default")
    )

    def of(rope: RopeConfig, length: int) -> str:
        return fingerprint_of(config, torch.bfloat16, None, (rope_table(rope, 8, length, torch.zeros(1)),))

    assert of(long, 32) == of(long, 64) != of(long, 128)
    assert of(plain, 32) == of(plain, 128)
