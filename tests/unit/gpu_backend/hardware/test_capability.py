# What a GPU cannot run is refused at start, with what would be right.

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_backend.execution.loading import load_draft_config
from gpu_backend.hardware.capability import check_capability
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.packed_format import PackedFormat
from gpu_backend.simulate.hardware import PUBLISHED
from gpu_backend.step.config import engine_config
from tests.support.tiny_model import TinyModel


@pytest.mark.parametrize(
    ("name", "asked", "remedy"),
    [
        ("Llama-3.1-8B", {"quantization": "fp8"}, "quantization cannot be fp8; take int8, or leave it out"),
        ("Mixtral-8x7B", {"quantization": "fp8"}, "quantization cannot be fp8; leave it out"),
        ("Llama-3.1-8B", {"kv_cache_dtype": "fp8"}, "kv_cache_dtype cannot be fp8; leave it out"),
        ("Llama-3.1-8B", {}, "the checkpoint's weights cannot be fp8; take its checkpoint of 16 bits, or of 4"),
    ],
)
def test_float8_is_refused_below_its_capability(name: str, asked: dict[str, Any], remedy: str) -> None:
    """Of weights, of the cache, and as the checkpoint has it, with what there is instead; an L4 has it, and an A100
    runs 16 bits."""
    model = replace(PUBLISHED[name], packed=None if asked else PackedFormat("fp8"))

    with pytest.raises(UnsupportedModel, match=rf"capability 8\.0, and float8 needs 8\.9 or more .*: {remedy}$"):
        check_capability(engine_config("x", **asked), model, (8, 0))
    check_capability(engine_config("x", **asked), model, (8, 9))
    check_capability(engine_config("x"), PUBLISHED["Llama-3.1-8B"], (8, 0))


def test_a_draft_model_is_held_to_the_same(tmp_path: Path) -> None:
    """Float8 of its checkpoint is refused by the setting that names it; such a model in 16 bits drafts."""
    plain, model = TinyModel(), PUBLISHED["Llama-3.1-8B"]
    rounded = replace(plain, extra={"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    for name, tiny in (("plain", plain), ("rounded", rounded)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(tiny.config()))

    def check(name: str) -> None:
        config = engine_config("x", speculative_method="draft", speculative_model=str(tmp_path / name))
        check_capability(config, model, (8, 0), load_draft_config(config, model))

    check("plain")
    with pytest.raises(UnsupportedModel, match="the weights of speculative_model cannot be fp8"):
        check("rounded")


def test_latent_attention_needs_shared_memory() -> None:
    """An L40S has too little for it; an A100 has enough."""
    with pytest.raises(UnsupportedModel, match="99 KiB of shared memory; attention over latent vectors takes 112"):
        check_capability(engine_config("x"), PUBLISHED["GLM-4.7-Flash"], (8, 9))
    check_capability(engine_config("x"), PUBLISHED["GLM-4.7-Flash"], (8, 0))
