# Weights and a KV cache of few bits: how far they are from the numbers they stand for, layer by layer and in what the
# demo model says.

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.precision import layer_errors, load_pair, perplexity, plant_outliers
from gpu_backend.demo_model import CHECKPOINT
from gpu_backend.execution.runner import Runner
from gpu_backend.kernels.layout.quantized_kv import load_kv, quantize_kv, scales_from
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import load_model_config
from gpu_backend.models.quantization import pack_int4, quantize
from gpu_backend.step.config import engine_config
from tests.support.tiny_model import TinyModel, write_tiny_model

# ‖product − that of the whole numbers‖ / ‖it‖ for normal weights. Rounding x to n even steps of its range costs
# step / √12: about 0.8 % for eight bits, 11 % for four; e4m3 keeps three bits of each number, 2.5 % a side.
ALLOWED = {"int8": 0.012, "w8a8": 0.018, "fp8": 0.045, "int4": 0.13}


def relative_error(out: Tensor, expected: Tensor) -> float:
    return ((out - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("method", ALLOWED)
@pytest.mark.parametrize("outliers", [0, 3])
def test_rounded_products_stay_close(method: str, outliers: int) -> None:
    """Each method is as exact as its bits, also where a few input channels are thirty times as large as the others:
    but for inputs in whole numbers, whose steps are then thirty times as wide for all channels.
    """
    torch.manual_seed(5)
    x, weight, bias = torch.randn(40, 256), torch.randn(96, 256), torch.randn(96)
    x[:, :outliers] *= 30

    out = quantize(weight, bias, method)(x)

    assert (
        0.001
        < relative_error(out, F.linear(x, weight, bias))
        < (0.08 if method == "w8a8" and outliers else ALLOWED[method] * 1.25)
    )


def test_four_bits_are_packed_by_halves_of_a_group() -> None:
    """Byte i of a group holds number i in its low bits and number i + half in its high ones."""
    numbers = torch.tensor([[0, 1, 14, 15, 8, 9, 10, 11]])

    packed = pack_int4(numbers, group=4)

    assert packed.tolist() == [[0 | 14 << 4, 1 | 15 << 4, 8 | 10 << 4, 9 | 11 << 4]]


def test_four_bits_take_the_scale_with_the_least_error() -> None:
    """A group with one large weight is not rounded by that weight alone."""
    torch.manual_seed(2)
    weight = torch.randn(50, 128)
    kept = quantize(weight, None, "int4")
    plain_scale = weight.abs().amax(1, keepdim=True) / 7
    plain = (weight / plain_scale).round().clamp(-8, 7) * plain_scale

    out = kept(torch.eye(128)).T

    assert (out - weight).square().sum() < 0.97 * (plain - weight).square().sum()


def test_matrix_that_does_not_divide_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="in groups of 32; a matrix has 80"):
        quantize(torch.randn(4, 80), None, "int4")


def test_float8_cache_keeps_three_bits_and_cuts_what_is_beyond() -> None:
    """Scales follow each head's own largest number; one four times as large as it still fits, what is more is cut."""
    torch.manual_seed(1)
    kv = torch.randn(5, 16, 2, 3, 8) * torch.tensor([0.01, 1.0, 100.0])[:, None]
    scales = scales_from(kv)

    def kept(numbers: Tensor) -> Tensor:
        both = torch.stack([quantize_kv(numbers, scales.key), quantize_kv(numbers, scales.value)], 1)
        return load_kv(both, scales, torch.float32)[:, 0]

    keys = kv[:, :, 0].flatten(0, 1)
    for head in range(3):
        assert relative_error(kept(keys)[:, head], keys[:, head]) < 0.03
    assert relative_error(kept(keys * 3.9), keys * 3.9) < 0.03
    assert torch.allclose(kept(torch.full((1, 3, 8), 1e9))[0, :, 0], scales.key * 448)


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"quantization": "w8a8"}, 1.01),
        ({"quantization": "int4"}, 1.25),
        pytest.param({"quantization": "int8"}, 1.003, marks=pytest.mark.soak),
        pytest.param({"quantization": "fp8"}, 1.02, marks=pytest.mark.soak),
        pytest.param({"kv_cache_dtype": "fp8"}, 1.02, marks=pytest.mark.soak),
    ],
)
def test_demo_model_barely_notices(settings: dict[str, str], allowed: float) -> None:
    """Perplexity on a text of its own kind grows by no more than this."""
    plain, rounded = (perplexity(engine_config(str(CHECKPOINT), device="cpu", **some)) for some in ({}, settings))

    assert plain != rounded and rounded / plain < allowed, f"perplexity {plain:.4f} becomes {rounded:.4f}"


def test_float8_cache_has_twice_the_room(tmp_path: Path) -> None:
    """A number of the cache takes one byte in the place of two or four."""
    folder = write_tiny_model(tmp_path, TinyModel())
    room: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "cpu_kv_bytes": 100_000, "max_num_seqs": 64}
    plain, half = (
        Runner(engine_config(str(folder), kv_cache_dtype=kept, **room), load_model_config(folder)).num_blocks
        for kept in ("auto", "fp8")
    )

    assert half in (2 * plain, 2 * plain + 1)


def test_planted_outliers_are_outliers_and_change_nothing_else(tmp_path: Path) -> None:
    """The benchmark's second checkpoint says what the first says, and is harder for integers, but not for float8."""
    planted = plant_outliers(CHECKPOINT, tmp_path / "planted")
    plain, hard = (perplexity(engine_config(str(folder), device="cpu")) for folder in (CHECKPOINT, planted))

    errors = {
        method: [max(layer_errors(*load_pair(f, method, smoothed=False), count=100)) for f in (CHECKPOINT, planted)]
        for method in ("w8a8", "fp8")
    }

    assert hard == pytest.approx(plain, rel=1e-5)
    assert errors["w8a8"][1] > 2 * errors["w8a8"][0] and errors["fp8"][1] < 1.5 * errors["fp8"][0]
