# Outliers are moved from inputs into weights before whole numbers are made of them: the model says the same to the bit
# until it is rounded, and rounding costs it less, on one rank and on several.

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.precision import layer_errors, load_pair, plant_outliers
from gpu_backend.demo_model import CHECKPOINT
from gpu_backend.models.config.model import load_model_config
from gpu_backend.models.layers import Decoder, DecoderLayer
from gpu_backend.models.llama import load_model
from gpu_backend.models.quantization import Linear
from gpu_backend.models.shards import ShardedWeights, config_of_rank, stage_of
from gpu_backend.models.smoothing import begin_passage, find_factors, smooth
from gpu_backend.models.weights import Checkpoint, LinearOptions
from tests.support.engine import answer_all, greedy, model_loop
from tests.support.tiny_model import TinyModel, write_tiny_model

CPU = torch.device("cpu")
MODEL = TinyModel("Qwen2ForCausalLM", hidden_size=64, intermediate_size=128, num_layers=3)
AT_MOST = {"w8a8": 0.3, "int8": 0.6}  # of the error that outliers cause where they are left


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant_outliers(CHECKPOINT, tmp_path_factory.mktemp("outliers") / "planted")


@pytest.mark.parametrize("method", AT_MOST)
def test_planted_outliers_cost_less(method: str, planted: Path) -> None:
    """Each layer's error against bfloat16 falls."""
    left, moved = (layer_errors(*load_pair(planted, method, smoothed=some), count=100) for some in (False, True))

    assert sum(moved) < AT_MOST[method] * sum(left)


def test_function_stays_the_same_to_the_bit(planted: Path) -> None:
    """Factors are powers of two: whatever was moved, every logit is what it was."""
    config = load_model_config(planted)
    plain = load_model(config, Checkpoint(planted, CPU, torch.bfloat16), 64)
    passage, layers = begin_passage(plain), []
    for layer in plain.layers:
        moved, passage = smooth(layer, passage, "w8a8")
        layers.append(moved)

    assert all(not torch.equal(a.mlp_norm, b.mlp_norm) for a, b in zip(plain.layers, layers, strict=True))
    assert torch.equal(logits_of(plain), logits_of(replace(plain, layers=tuple(layers))))


def test_inputs_without_outliers_are_left_alone() -> None:
    """What gains nothing is not moved; one large channel is, by about the paper's factor."""
    torch.manual_seed(3)
    x, weight = torch.randn(50, 64), torch.randn(32, 64)
    large = x * torch.where(torch.arange(64) == 7, 100.0, 1.0)

    assert torch.equal(find_factors(x, weight, "w8a8"), torch.ones(64))
    factors = find_factors(large, weight, "w8a8")
    assert factors[7] / factors.median() in (8, 16, 32) and (factors.log2() == factors.log2().round()).all()


@pytest.mark.parametrize("method", ["w8a8", "int4"])
def test_stages_round_as_the_whole_does(method: str, tmp_path: Path) -> None:
    """A pipeline's later stage sends the tokens through the layers before its own, too."""
    folder = write_tiny_model(tmp_path, MODEL)
    config = load_model_config(folder)
    whole = load_model(config, source(folder, method), 64)

    layers = [
        layer for stage in (0, 1) for layer in load_model(stage_of(config, stage, 2), source(folder, method), 64).layers
    ]

    assert len(layers) == 3
    for one, other in zip(whole.layers, layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(one), tensors_of(other), strict=True))


def test_ranks_of_a_layer_add_up_while_it_is_smoothed(tmp_path: Path) -> None:
    """Half of the heads and of the MLP: what goes on to the next layer is the sum over the ranks."""
    folder = write_tiny_model(tmp_path, MODEL)
    config = config_of_rank(load_model_config(folder), 2)
    added: list[torch.Tensor] = []

    def add(part: torch.Tensor) -> torch.Tensor:
        added.append(part)
        return part

    linear = LinearOptions("w8a8", add_ranks=add)
    load_model(config, ShardedWeights(Checkpoint(folder, CPU, torch.float32, linear), 1, 2), 64)

    assert len(added) == 2 * 3


@pytest.mark.parametrize("method", ["w8a8", "int8"])
def test_engine_says_what_it_says_without_rounding(method: str, tmp_path: Path) -> None:
    """A reply's beginning on random weights, biases among them."""
    folder = write_tiny_model(tmp_path, MODEL)
    command = greedy("x", range(40, 75), 3)
    plain, rounded = (
        answer_all(model_loop(folder, quantization=some), [command])["x", 0].token_ids for some in (None, method)
    )

    assert rounded == plain


def source(folder: Path, method: str) -> Checkpoint:
    return Checkpoint(folder, CPU, torch.float32, LinearOptions(method))


def tensors_of(layer: DecoderLayer) -> list[torch.Tensor]:
    products = (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
    assert all(product.scales is not None for product in products)
    norms = [layer.attention_norm, layer.mlp_norm]
    return norms + [some for it in products if isinstance(it, Linear) for some in (it.weight, it.scales)]


def logits_of(model: Decoder) -> torch.Tensor:
    """Return what a model says of some text, by the passage of its tokens alone."""
    passage = begin_passage(model)
    for layer in model.layers:
        _, passage = smooth(layer, passage, "int8")
    assert passage.residual is not None
    return model.logits(passage.x + passage.residual)
