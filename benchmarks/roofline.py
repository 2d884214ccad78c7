# The least time a device could take for given replies of a given model: what it must read over its memory bandwidth,
# plus the prompts' arithmetic over its matrix rate. Pure; the shapes and the workload of the engine benchmark too.

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpu_backend.hardware.roofline import HardwarePeaks
from gpu_backend.models.config.model import ModelConfig, parse_model_config


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, and how many tokens its reply gets."""

    prompt: tuple[int, ...]
    output: int


# Dense bf16 and memory bandwidth as the vendor states them, by the name that the driver gives the device.
DATASHEETS = {
    "NVIDIA H200": HardwarePeaks(4.8e12, 989e12, 1979e12),
    "NVIDIA H100 80GB HBM3": HardwarePeaks(3.35e12, 989e12, 1979e12),
    "NVIDIA A100-SXM4-80GB": HardwarePeaks(2.039e12, 312e12),
    "NVIDIA A100 80GB PCIe": HardwarePeaks(1.935e12, 312e12),
    "NVIDIA A10": HardwarePeaks(0.6e12, 125e12),
}


def _config(architecture: str, *sizes: int, theta: float, tied: bool, **extra: Any) -> dict[str, Any]:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "head_dim", "max_position_embeddings")  # fmt: skip
    return {
        "architectures": [architecture],
        "model_type": "qwen3" if architecture.startswith("Qwen3") else "llama",
        **dict(zip(names, sizes, strict=True)),
        "rope_theta": theta,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        **extra,
    }


# config.json of each model whose shape is measured.
SHAPES = {
    "Qwen3-0.6B": _config("Qwen3ForCausalLM", 151936, 1024, 3072, 28, 16, 8, 128, 40960, theta=1e6, tied=True),
    "Llama-3.1-8B": _config("LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8, 128, 131072, theta=5e5, tied=False),
    "Qwen3-14B": _config("Qwen3ForCausalLM", 151936, 5120, 17408, 40, 40, 8, 128, 40960, theta=1e6, tied=False),
}
LARGE = {
    "Llama-3.3-70B": _config("LlamaForCausalLM", 128256, 8192, 28672, 80, 64, 8, 128, 131072, theta=5e5, tied=False),
}
MIXTURES = {
    "Mixtral-8x7B": _config("MixtralForCausalLM", 32000, 4096, 14336, 32, 32, 8, 128, 32768, theta=1e6, tied=False,
                            num_local_experts=8, num_experts_per_tok=2),
    "Qwen3-30B-A3B": _config("Qwen3MoeForCausalLM", 151936, 2048, 6144, 48, 32, 4, 128, 40960, theta=1e6, tied=False,
                             num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True),
}  # fmt: skip
TINY_SHAPES = {"tiny": _config("Qwen3ForCausalLM", 512, 64, 96, 2, 4, 2, 16, 2048, theta=1e4, tied=True)}
TINY_MIXTURES = {
    "tiny mixture": _config("MixtralForCausalLM", 512, 64, 96, 2, 4, 2, 16, 2048, theta=1e4, tied=True,
                            num_local_experts=4, num_experts_per_tok=2)
}  # fmt: skip


def shared_workload() -> list[Request]:
    """Return the benchmark that several engines publish: nano-vllm's bench.py, drawn in its order from seed 0."""
    dice = random.Random(0)
    prompts = [tuple(dice.randint(0, 10_000) for _ in range(dice.randint(100, 1024))) for _ in range(256)]
    return [Request(prompt, dice.randint(100, 1024)) for prompt in prompts]


def least_seconds(
    config: dict[str, Any], work: Sequence[tuple[int, int]], peaks: HardwarePeaks, fp8: bool = False
) -> float:
    """Return the roofline of replies given as (prompt tokens, reply tokens), all of them at once.

    Weights (of experts, those that are chosen) are read once per token of the longest reply, each reply token reads the
    keys and values before it, and prompts cost their matrix products. Nothing overlaps. Everything is bf16, or, but for
    the head, ``fp8``.
    """
    model = parse_model_config(config)
    steps = max((output for _, output in work), default=0)
    width = 1 if fp8 else 2
    kv_bytes = width * model.kv_floats_per_token
    kv_read = sum(kv_bytes * (prompt * output + output * (output - 1) // 2) for prompt, output in work)
    layers, head = _parameters(model)
    rate = (peaks.fp8_flops or peaks.flops) if fp8 else peaks.flops
    products = 2 * layers * sum(prompt for prompt, _ in work) / rate
    read = width * model.weights_read(len(work)) + 2 * head
    return (read * steps + kv_read) / peaks.bandwidth + products


def token_flops(config: dict[str, Any]) -> float:
    """Return the operations of one token's matrix products, the head's included."""
    return 2.0 * sum(_parameters(parse_model_config(config)))


def _parameters(model: ModelConfig) -> tuple[int, int]:
    """Return the weights of all layers that a token is multiplied with, and those of the output head."""
    head = model.vocab_size * model.hidden_size
    return model.products_per_token - head, head
