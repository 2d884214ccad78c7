# Models and devices as numbers: what a token of KV cache takes, and how long a step does. Devices are the vendors'
# datasheets; how much of them is reached was fitted to published measurements, see docs/simulator.md. Models are read
# from what was published of them (published.json), or written down here in round numbers.

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_backend.models.config.model import ModelConfig, parse_model_config
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
CHUNK_SECONDS = 8 * 0.000005 / 64  # of a token in a layer of linear attention: eight small kernels for each chunk of 64


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator: bytes of memory, bytes per second, dense bf16 operations per second, bytes to the host."""

    memory: float
    bandwidth: float
    flops: float
    host_link: float  # bytes per second in one direction
    link: float  # to another of its machine, the same way
    capability: tuple[int, int]  # compute capability: what kernels can run


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder's size."""

    parameters: float  # of all layers, if ``head`` and ``embedding`` are named apart
    layers: int  # that have keys and values
    heads: int
    kv_heads: int
    head_dim: int  # of a key in the cache
    latent_rank: int = 0  # of a latent vector, which is the first of a key's numbers, and the value; 0: there is none
    tower_parameters: float = 0.0  # of what reads pictures
    experts: float = 0.0  # parameters of all experts among which a token chooses
    chosen: float = 1.0  # the share of them that a token chooses
    wide: float = 0.0  # parameters of layers that have 16 bits in every format
    # Numbers of the output head, and of embeddings beside it: 16 bits, whole on every device, as what reads pictures.
    head: float = 0.0
    embedding: float = 0.0
    hidden_size: int = 0  # numbers of a token that devices add up twice a layer; 0: what that moves is left out
    linear_layers: int = 0  # beside those with keys and values
    state_bytes: float = 0.0  # that these keep of a sequence, on all devices together

    def kv_bytes_per_token(self, bytes_per_number: float = 2) -> float:
        """Bytes that one token takes in the KV cache: of all devices together, unless each has all of it."""
        return (1 if self.latent_rank else 2) * self.layers * self.kv_heads * self.head_dim * bytes_per_number

    def copies_of_cache(self, gpus: int) -> int:
        """Return on how many of a replica's devices each number of its KV cache lies: latent vectors on all."""
        return gpus if self.latent_rank else 1

    @property
    def state_tokens(self) -> float:
        """Tokens whose keys and values are read in the time in which a step reads and writes a sequence's state."""
        return 2 * self.state_bytes / self.kv_bytes_per_token()

    @property
    def chunk_seconds(self) -> float:
        """Seconds of each token of a prompt in layers of linear attention, whose chunks follow each other."""
        return self.linear_layers * CHUNK_SECONDS

    @property
    def pair_operations(self) -> int:
        """Operations for one query and one key, all layers and heads together."""
        return 2 * self.layers * self.heads * (self.head_dim + (self.latent_rank or self.head_dim))

    def weight_bytes(self, bytes_per_number: float = 2, gpus: int = 1) -> float:
        """Bytes of all weights, on all devices of a replica together."""
        everywhere = self.head + self.embedding + self.tower_parameters
        return self._layer_bytes(bytes_per_number) + 2 * everywhere * gpus

    def bytes_read(self, bytes_per_number: float = 2, tokens: float = math.inf, gpus: int = 1) -> float:
        """Bytes of the weights that a step reads on all devices, if its tokens choose experts evenly; one of very many
        reads all. The head, which is not cut, takes as long as if each device read it."""
        unread = self.experts * (1 - self.chosen) ** tokens
        return self._layer_bytes(bytes_per_number) - unread * bytes_per_number + 2 * self.head * gpus

    @property
    def active(self) -> float:
        """Parameters of layers that a token is multiplied with."""
        return self.parameters - self.experts * (1 - self.chosen)

    def _layer_bytes(self, bytes_per_number: float) -> float:
        return (self.parameters - self.wide) * bytes_per_number + 2 * self.wide


def model_of(config: ModelConfig) -> Model:
    """Return the size of a model by its config.json; of pictures' towers it knows nothing."""
    head, experts, chosen = config.vocab_size * config.hidden_size, 0.0, 1.0
    if config.experts is not None:
        chosen = config.experts.per_token / config.experts.number
        experts = config.weights_read() - config.weights_read(0)
    return Model(
        parameters=config.weights_read(),
        layers=config.num_kv_layers,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        latent_rank=config.latent.rank if config.latent is not None else 0,
        experts=experts,
        chosen=chosen,
        wide=config.weights_read() - experts if config.has_sinks else 0.0,  # GPT-OSS keeps its experts alone in 4 bits
        head=head,
        embedding=0 if config.tie_word_embeddings else head,
        hidden_size=config.hidden_size,
        linear_layers=config.num_layers - config.num_kv_layers,
        state_bytes=config.linear.state_bytes(2) if config.linear is not None else 0.0,
    )


DEVICES = {
    "l4": Device(24e9, 0.3e12, 121e12, 32e9, 32e9, (8, 9)),
    "l40s": Device(48e9, 0.864e12, 362e12, 32e9, 32e9, (8, 9)),
    "a100-80gb": Device(80e9, 2.039e12, 312e12, 32e9, 300e9, (8, 0)),
    "h100": Device(80e9, 3.35e12, 989e12, 64e9, 450e9, (9, 0)),
    "h200": Device(141e9, 4.8e12, 989e12, 64e9, 450e9, (9, 0)),
    "b200": Device(180e9, 7.7e12, 2250e12, 64e9, 900e9, (10, 0)),
}


def _published() -> dict[str, ModelConfig]:
    kept = json.loads((Path(__file__).parent / "published.json").read_text(encoding="utf-8"))
    return {name: parse_model_config(config) for name, config in kept["models"].items()}


PUBLISHED = _published()  # by the names that their publishers give them
MODELS = {name.lower(): model_of(config) for name, config in PUBLISHED.items()} | {
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
    "deepseek-v2-lite": Model(15.7e9, 27, 16, 1, 576, 512, experts=14.6e9, chosen=6 / 64),
}

# Of these alone a trace is replayed: prompts to the others find no blocks of earlier ones, and go on from no copies.
REPLAYED = {name: model for name, model in MODELS.items() if not model.state_bytes}

# Bytes a weight. Four bits have a scale beside them: in float32 for 128 inputs, or, as mxfp4 has it, a byte for 32.
PRECISIONS = {"bf16": 2.0, "fp8": 1.0, "int4": 17 / 32}


def step_cost(
    model: Model,
    device: Device,
    gpus: int = 1,
    weight_bytes: float = 2,
    kv_bytes: float = 2,
    tokens: float = math.inf,
) -> StepCost:
    """Predict a step of a replica of ``gpus`` devices that share every layer.

    It reads all weights, as a mixture's step of some dozens of ``tokens`` does nearly: of fewer, those they choose.
    """
    bandwidth, flops = device.bandwidth * gpus, device.flops * gpus
    sums = 2 * (model.layers + model.linear_layers)
    links = sums * LINK_SECONDS if gpus > 1 else 0.0
    moved = sums * model.hidden_size * 2 * 2 * (gpus - 1) / gpus  # of a token, by each device: a ring
    return StepCost(
        fixed=FIXED_SECONDS + links,
        weights=model.bytes_read(weight_bytes, tokens, gpus) / (bandwidth * WEIGHTS_SHARE),
        token=2 * model.active / (flops * PRODUCTS_SHARE) + moved / device.link,
        context=model.kv_bytes_per_token(kv_bytes) * model.copies_of_cache(gpus) / (bandwidth * CONTEXT_SHARE),
        pair=model.pair_operations / (flops * ATTENTION_SHARE),
    )


def beside_states(cost: StepCost, model: Model, context: float) -> StepCost:
    """Return what a step takes with the states of its sequences: they are read with the contexts, here as if each of
    these had so many tokens, and prompts go through them chunk by chunk."""
    read = cost.context * (1 + model.state_tokens / context)
    return replace(cost, context=read, token=cost.token + model.chunk_seconds)


def copy_seconds(model: Model, device: Device, gpus: int, block_size: int, kv_bytes: float = 2) -> float:
    """Predict a KV block's way to host memory or back; each device of a replica copies what it has of it."""
    bytes_of_all = block_size * model.kv_bytes_per_token(kv_bytes) * model.copies_of_cache(gpus)
    return bytes_of_all / (device.host_link * gpus * HOST_SHARE)


def resident_tokens(
    model: Model,
    device: Device,
    gpus: int,
    weight_bytes: float = 2,
    kv_bytes: float = 2,
    memory_share: float = 1.0,
    sequences: int = 0,
) -> int:
    """Return how many tokens of KV cache fit beside the weights, and beside states of so many sequences; 0 if not even
    these fit."""
    room = device.memory * gpus * memory_share - model.weight_bytes(weight_bytes, gpus)
    room -= (sequences + 1) * model.state_bytes  # one more for places without a sequence
    return max(0, int(room / (model.kv_bytes_per_token(kv_bytes) * model.copies_of_cache(gpus))))


def resident_sequences(
    model: Model, device: Device, gpus: int, weight_bytes: float, length: int, memory_share: float = 1.0
) -> int:
    """Return how many sequences of so many tokens fit beside the weights, each with its state."""
    tokens = resident_tokens(model, device, gpus, weight_bytes, memory_share=memory_share)
    return int(tokens / (length + model.state_tokens / 2))


def least_gpus(model: Model, device: Device, weight_bytes: float = 2, memory_share: float = 0.9) -> int:
    """Return the smallest power of two of devices that hold the weights and one long sequence beside them."""
    gpus = 1
    while not resident_sequences(model, device, gpus, weight_bytes, LONG_SEQUENCE, memory_share):
        gpus *= 2
    return gpus
