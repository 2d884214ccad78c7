# Models and devices as numbers: what a token of KV cache takes, and how long a step does. Devices are the vendors'
# datasheets; how much of them is reached was fitted to published measurements, see docs/simulator.md.

from __future__ import annotations

from dataclasses import dataclass

from gpu_backend.step.cost import StepCost

# Llama-3.1-8B on one H100: 6.44 ms a step and 43.7 ns a token of context (vLLM 0.19, one sequence).
WEIGHTS_SHARE = 0.77  # of the memory's bandwidth, reading weights
CONTEXT_SHARE = 0.895  # of the memory's bandwidth, reading keys and values
PRODUCTS_SHARE = 0.65  # of the matrix rate, in the products of a long prefill
ATTENTION_SHARE = 0.5  # of the matrix rate, in its attention
HOST_SHARE = 0.8  # of the link to host memory, in copies of whole blocks from and to pinned memory
FIXED_SECONDS = 0.0002  # launching a step and reading its result
LONG_SEQUENCE = 8192  # tokens that a replica must hold beside its weights, to be of any use
LINK_SECONDS = 0.00001  # one all-reduce between the devices of a replica; two of them a layer


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator: bytes of memory, bytes per second, dense bf16 operations per second, bytes to the host."""

    memory: float
    bandwidth: float
    flops: float
    host_link: float  # bytes per second in one direction


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder's size."""

    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int  # of a key in the cache
    active_parameters: float | None = None  # of a mixture of experts: those that a token is multiplied with
    latent_rank: int = 0  # of a latent vector, which is the first of a key's numbers, and the value; 0: there is none
    tower_parameters: float = 0.0  # of what reads pictures: whole on every device, in 16 bits

    def kv_bytes_per_token(self, bytes_per_number: float = 2) -> float:
        """Bytes that one token takes in the KV cache: of all devices together, unless each has all of it."""
        return (1 if self.latent_rank else 2) * self.layers * self.kv_heads * self.head_dim * bytes_per_number

    def copies_of_cache(self, gpus: int) -> int:
        """Return on how many of a replica's devices each number of its KV cache lies: latent vectors on all."""
        return gpus if self.latent_rank else 1

    @property
    def pair_operations(self) -> int:
        """Operations for one query and one key, all layers and heads together."""
        return 2 * self.layers * self.heads * (self.head_dim + (self.latent_rank or self.head_dim))

    def weight_bytes(self, bytes_per_number: float = 2) -> float:
        """Bytes of all weights."""
        return self.parameters * bytes_per_number


DEVICES = {
    "a100-80gb": Device(80e9, 2.039e12, 312e12, 32e9),
    "h100": Device(80e9, 3.35e12, 989e12, 64e9),
    "h200": Device(141e9, 4.8e12, 989e12, 64e9),
}

MODELS = {
    "qwen3-0.6b": Model(0.6e9, 28, 16, 8, 128),
    "llama-7b": Model(7e9, 32, 32, 32, 128),
    "llama-8b": Model(8e9, 32, 32, 8, 128),
    "qwen3-14b": Model(14.8e9, 40, 40, 8, 128),
    "gemma3-12b": Model(11.8e9, 48, 16, 8, 256),  # every layer is counted as one that sees all, as the cache has it
    "phi-4": Model(14.7e9, 40, 40, 10, 128),
    "pixtral-12b": Model(12.2e9, 40, 32, 8, 128, tower_parameters=0.44e9),
    "mistral-small-24b": Model(23.6e9, 40, 32, 8, 128, tower_parameters=0.44e9),  # from 3.1 on
    "gemma3-27b": Model(27e9, 62, 32, 16, 128),
    "olmo2-32b": Model(32.2e9, 64, 40, 8, 128),
    "glm4-32b": Model(32.6e9, 61, 48, 2, 128),
    "llama-70b": Model(70e9, 80, 64, 8, 128),
    "llama-405b": Model(405e9, 126, 128, 8, 128),
    "mixtral-8x7b": Model(46.7e9, 32, 32, 8, 128, 12.9e9),
    "mixtral-8x22b": Model(141e9, 56, 48, 8, 128, 39e9),
    "qwen3-30b-a3b": Model(30.5e9, 48, 32, 4, 128, 3.3e9),
    "qwen3-235b-a22b": Model(235e9, 94, 64, 4, 128, 22e9),
    "deepseek-v2-lite": Model(15.7e9, 27, 16, 1, 576, 2.4e9, 512),
    "glm-4.7-flash": Model(30e9, 47, 20, 1, 576, 3.6e9, 512),
    "deepseek-v3": Model(671e9, 61, 128, 1, 576, 37e9, 512),
    "kimi-k2": Model(1.03e12, 61, 64, 1, 576, 32e9, 512),
}

PRECISIONS = {"bf16": 2.0, "fp8": 1.0, "int4": 0.5}  # bytes a weight


def step_cost(model: Model, device: Device, gpus: int = 1, weight_bytes: float = 2, kv_bytes: float = 2) -> StepCost:
    """Predict a step of a replica of ``gpus`` devices that share every layer.

    It reads all weights: a mixture's step of a few tokens reads fewer, one of some dozens nearly all.
    """
    bandwidth, flops = device.bandwidth * gpus, device.flops * gpus
    links = 2 * model.layers * LINK_SECONDS if gpus > 1 else 0.0
    return StepCost(
        fixed=FIXED_SECONDS + links,
        weights=model.weight_bytes(weight_bytes) / (bandwidth * WEIGHTS_SHARE),
        token=2 * (model.active_parameters or model.parameters) / (flops * PRODUCTS_SHARE),
        context=model.kv_bytes_per_token(kv_bytes) * model.copies_of_cache(gpus) / (bandwidth * CONTEXT_SHARE),
        pair=model.pair_operations / (flops * ATTENTION_SHARE),
    )


def copy_seconds(model: Model, device: Device, gpus: int, block_size: int, kv_bytes: float = 2) -> float:
    """Predict a KV block's way to host memory or back; each device of a replica copies what it has of it."""
    bytes_of_all = block_size * model.kv_bytes_per_token(kv_bytes) * model.copies_of_cache(gpus)
    return bytes_of_all / (device.host_link * gpus * HOST_SHARE)


def resident_tokens(
    model: Model, device: Device, gpus: int, weight_bytes: float = 2, kv_bytes: float = 2, memory_share: float = 1.0
) -> int:
    """Return how many tokens of KV cache fit beside the weights; 0 if not even these fit."""
    room = device.memory * gpus * memory_share - model.weight_bytes(weight_bytes) - 2 * model.tower_parameters * gpus
    return max(0, int(room / (model.kv_bytes_per_token(kv_bytes) * model.copies_of_cache(gpus))))


def least_gpus(model: Model, device: Device, weight_bytes: float = 2, memory_share: float = 0.9) -> int:
    """Return the smallest power of two of devices that hold the weights and one long sequence beside them."""
    gpus = 1
    while resident_tokens(model, device, gpus, weight_bytes, memory_share=memory_share) < LONG_SEQUENCE:
        gpus *= 2
    return gpus
