# What fewer bits cost, without a GPU: bytes, the error of each layer against bfloat16, and perplexity, on the demo
# model as it is and with outliers planted in it.
#
#   python -m benchmarks.precision --out FILE    writes the table, in Markdown, there too

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from shutil import copytree

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpu_backend.demo_model import CHECKPOINT
from gpu_backend.execution.runner import Runner
from gpu_backend.kernels.layout.grouping import Grouping
from gpu_backend.kernels.layout.quantized_kv import KvScales, scales_from
from gpu_backend.models.config.model import load_model_config
from gpu_backend.models.layers import Decoder
from gpu_backend.models.llama import load_model
from gpu_backend.models.quantization import Linear
from gpu_backend.models.smoothing import rounded
from gpu_backend.models.weights import Checkpoint, LinearOptions
from gpu_backend.step.config import EngineConfig, engine_config
from gpu_backend.step.plan import SequenceStep, StepPlan
from gpu_backend.step.sampling_params import SamplingParams
from gpu_backend.step.step_tensors import StepTensors, build_tensors
from tools.demo_training.lessons import DATA

CPU = torch.device("cpu")
TOKENS = 400
OUTLIERS = 3  # of a layer's inputs to each kind of product
STRENGTH = 32.0  # a power of two: planting changes no other bit
METHODS: tuple[tuple[str, str | None, str, bool], ...] = (  # name, quantization, kv_cache_dtype, whether smoothed
    ("bfloat16", None, "auto", True), ("fp8, rows", "fp8", "auto", True), ("int8 weights", "int8", "auto", True),
    ("int8 weights, outliers left", "int8", "auto", False),
    ("int8 weights and inputs (w8a8)", "w8a8", "auto", True), ("w8a8, outliers left", "w8a8", "auto", False),
    ("int4 weights", "int4", "auto", True), ("int4 weights, outliers left", "int4", "auto", False),
    ("KV cache of fp8", None, "fp8", True), ("fp8, rows, and KV cache", "fp8", "fp8", True),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one method on one checkpoint."""

    bytes_per_weight: float  # of the layers' products, scales included
    bytes_per_kv: float
    layer_errors: tuple[float, ...]  # ‖output − bfloat16's‖ / ‖what the layer adds‖, from the same input
    perplexity: float


def main() -> None:
    """Measure every method on both checkpoints; print and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.precision")
    parser.add_argument("--out", type=Path, help="file for the table, in Markdown")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        planted = plant_outliers(CHECKPOINT, Path(folder) / "planted")
        table = _header()
        for name, *how in METHODS:
            costs = [measure(some, *how) for some in (CHECKPOINT, planted)]
            table.append(_line(name, *costs))
    print("\n".join(table))
    if arguments.out:
        arguments.out.write_text("\n".join(table) + "\n")


def plant_outliers(folder: Path, target: Path) -> Path:
    """Write the same function with a few channels ``STRENGTH`` times as large before each product; return ``target``.

    What makes them large is undone in the product's own weights: behind norms, in values, and in the MLP.
    """
    copytree(folder, target)
    w = load_file(target / "model.safetensors")
    config = load_model_config(folder)
    dice = torch.Generator().manual_seed(0)
    shared = config.num_heads // config.num_kv_heads
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        readers = {
            "input_layernorm": [f"{attention}.{name}_proj.weight" for name in "qkv"],
            "post_attention_layernorm": [f"{mlp}.{name}_proj.weight" for name in ("gate", "up")],
        }
        for norm, names in readers.items():
            channels = torch.randperm(config.hidden_size, generator=dice)[:OUTLIERS]
            w[f"{layer}.{norm}.weight"][channels] *= STRENGTH
            for name in names:
                w[name][:, channels] /= STRENGTH
        channels = torch.randperm(config.intermediate_size, generator=dice)[:OUTLIERS]
        w[f"{mlp}.up_proj.weight"][channels] *= STRENGTH
        w[f"{mlp}.down_proj.weight"][:, channels] /= STRENGTH
        (channel,) = torch.randperm(config.num_kv_heads * config.head_dim, generator=dice)[:1].tolist()
        head, dim = divmod(channel, config.head_dim)
        w[f"{attention}.v_proj.weight"][channel] *= STRENGTH
        for query in range(head * shared, (head + 1) * shared):
            w[f"{attention}.o_proj.weight"][:, query * config.head_dim + dim] /= STRENGTH
    save_file(w, target / "model.safetensors")
    return target


def measure(folder: Path, quantization: str | None, kv_cache_dtype: str, smoothed: bool = True) -> Costs:
    """Compare a checkpoint at fewer bits with itself in bfloat16; bfloat16 with float32."""
    models = load_pair(folder, quantization, kv_cache_dtype, smoothed)
    engine = engine_config(
        str(folder), device="cpu", dtype="bfloat16", quantization=quantization, kv_cache_dtype=kv_cache_dtype
    )
    count, kept = (
        sum(map(size, _products(model))) for model, size in zip(models, (Tensor.numel, _num_bytes), strict=True)
    )
    return Costs(
        bytes_per_weight=kept / count,
        bytes_per_kv=1.0 if kv_cache_dtype == "fp8" else 2.0,
        layer_errors=tuple(layer_errors(*models, kv_cache_dtype == "fp8")),
        perplexity=perplexity(engine, None if smoothed else models[1]),
    )


def load_pair(
    folder: Path, quantization: str | None, kv_cache_dtype: str = "auto", smoothed: bool = True
) -> tuple[Decoder, Decoder]:
    """Return a checkpoint as it is compared with, and at fewer bits, its outliers ``smoothed`` or left."""
    is_plain = quantization is None and kv_cache_dtype == "auto"
    plain = _load(folder, torch.float32 if is_plain else torch.bfloat16, None)
    if quantization is None or smoothed:
        return plain, _load(folder, torch.bfloat16, quantization)
    return plain, replace(plain, layers=tuple(rounded(layer, quantization) for layer in plain.layers))


@torch.inference_mode()
def layer_errors(plain: Decoder, kept_as: Decoder, float8_cache: bool = False, count: int = TOKENS) -> list[float]:
    """Give each layer of both what reaches it in the first, of so many tokens."""
    tokens = text_tokens(count)
    batch, blocks = _batch(plain, tokens)
    scales = _kv_scales(kept_as) if float8_cache else [None] * len(plain.layers)
    x, residual = plain.embed(batch.token_ids), None
    errors = []
    for mine, other, layer_scales in zip(plain.layers, kept_as.layers, scales, strict=True):
        before = x if residual is None else x + residual
        ends = []
        for model, layer, some_scales in ((plain, mine, None), (kept_as, other, layer_scales)):
            dtype = model.embedding.dtype
            turns = [rope.at(batch.positions) for rope in model.ropes]
            cache = _cache(model, blocks, dtype if some_scales is None else torch.uint8)
            given = None if residual is None else residual.to(dtype)
            own_batch, _ = _batch(model, tokens)
            ends.append(layer(x.to(dtype), given, turns, cache[0], some_scales, own_batch))
        out, expected = ((added.float() + kept.float()) for added, kept in reversed(ends))
        errors.append(((out - expected).norm() / (expected - before.float()).norm()).item())
        x, residual = ends[0]
    return errors


def perplexity(config: EngineConfig, model: Decoder | None = None) -> float:
    """Return that of a fixed text, scored in one prefill, by the model that is configured or by another."""
    tokens = text_tokens(600)
    runner = Runner(config, load_model_config(config.checkpoint.folder))
    runner._model = model or runner._model
    blocks = tuple(range(-(-len(tokens) // config.cache.block_size)))
    step = SequenceStep(1, tokens, 0, blocks, False, SamplingParams(1, prompt_logprobs=0), 0, targets=tokens[1:])
    scores = runner.run(StepPlan(0, (step,))).outputs[0].scores
    return math.exp(-sum(score.logprob for score in scores) / len(scores))


def text_tokens(count: int) -> tuple[int, ...]:
    """Return the beginning of a text of the demo model's own kind."""
    from tokenizers import Tokenizer

    lessons = map(json.loads, (DATA / "engine.jsonl").read_text().splitlines())
    text = "".join(f"<|user|>{it['questions'][0]}<|end|><|assistant|>{it['answer']}<|end|>" for it in lessons)
    return tuple(Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")).encode(text).ids[:count])


def _load(folder: Path, dtype: torch.dtype, quantization: str | None) -> Decoder:
    config = load_model_config(folder)
    return load_model(config, Checkpoint(folder, CPU, dtype, LinearOptions(quantization)), config.max_position)


def _batch(model: Decoder, tokens: Sequence[int]) -> tuple[StepTensors, int]:
    """Return one chunk of these tokens, and how many blocks it takes; attention's groups are for that model's type."""
    blocks = -(-len(tokens) // 16)
    step = SequenceStep(1, tuple(tokens), 0, tuple(range(blocks)), False, SamplingParams(1), 0)
    grouping = Grouping(16, blocks, 16 * blocks, CPU, model.embedding.dtype)
    return build_tensors(StepPlan(0, (step,)), grouping, CPU), blocks


def _cache(model: Decoder, blocks: int, dtype: torch.dtype) -> Tensor:
    config = model.config
    return torch.zeros(config.num_layers, blocks + 1, 16, 2, config.num_kv_heads, config.head_dim, dtype=dtype)


def _kv_scales(model: Decoder) -> list[KvScales]:
    """Return each layer's scales as the engine measures them, by tokens from all over the vocabulary."""
    vocab = model.config.vocab_size
    batch, blocks = _batch(model, [i * vocab // 256 for i in range(256)])
    cache = _cache(model, blocks, model.embedding.dtype)
    model.hidden_states(batch, cache)
    return [scales_from(layer) for layer in cache.unbind(0)]


def _num_bytes(tensor: Tensor) -> int:
    return tensor.nbytes


def _products(model: Decoder) -> Iterator[Tensor]:
    """Yield all tensors that the weights of the layers' products are made of."""
    for layer in model.layers:
        for product in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down):
            yield product.weight
            if isinstance(product, Linear) and product.scales is not None:
                yield product.scales


def _header() -> list[str]:
    return [
        f"# Fewer bits on the demo model, {datetime.now(UTC):%Y-%m-%d}",
        f"\nOn the CPU, torch {torch.__version__}; `python -m benchmarks.precision`. A layer's error is ‖its output − "
        "bfloat16's‖ / ‖what it adds‖ from the same input (bfloat16's own: against float32), mean and worst of "
        f"{load_model_config(CHECKPOINT).num_layers} layers. Planted: {OUTLIERS} input channels of each product "
        f"{STRENGTH:.0f} times as large, and one of the values; the model's function is the same. Perplexity of 600 "
        "tokens of its own kind.\n",
        "| precision | bytes a weight | bytes a KV number | layer error | with outliers | perplexity | with outliers |",
        "| --- | --: | --: | --: | --: | --: | --: |",
    ]


def _line(name: str, plain: Costs, planted: Costs) -> str:
    errors = [f"{sum(c.layer_errors) / len(c.layer_errors):.2%}, {max(c.layer_errors):.2%}" for c in (plain, planted)]
    return (
        f"| {name} | {plain.bytes_per_weight:.2f} | {plain.bytes_per_kv:.0f} | {errors[0]} | {errors[1]} "
        f"| {plain.perplexity:.3f} | {planted.perplexity:.3f} |"
    )


if __name__ == "__main__":
    main()
