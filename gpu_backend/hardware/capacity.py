# How long sequences may be, and how many blocks of keys and values there are: as the memory allows.

from __future__ import annotations

import torch

from gpu_backend.hardware.memory_reserve import memory_reserve_bytes
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import ModelConfig
from gpu_backend.step.config import EngineConfig

GPU_SPARE_BYTES = 512 * 1024**2  # what libraries take, and graphs


def affordable_blocks(
    config: EngineConfig, model: ModelConfig, device: torch.device, itemsize: int, block_bytes: int, max_model_len: int
) -> int:
    """Return how many blocks fit the memory beside the weights, which are there already, and a step.

    On the CPU these are no more than all sequences at full length need. Raises ``UnsupportedModel`` if none fits.
    """
    if device.type == "cpu":
        useful = config.steps.max_num_seqs * -(-max_model_len // config.cache.block_size)
        return max(1, min(useful, config.cache.cpu_kv_bytes // block_bytes))
    torch.cuda.empty_cache()  # of what loading and rounding took in between
    free, total = torch.cuda.mem_get_info(device)
    step_bytes = memory_reserve_bytes(config, model, itemsize, max_model_len)
    room = int(free - (1 - config.cache.gpu_memory_share) * total) - step_bytes - GPU_SPARE_BYTES
    if room < block_bytes:
        raise UnsupportedModel(
            f"the device has no memory left for a KV cache beside a step's {step_bytes / 2**30:.1f} GiB; lower "
            "max_num_seqs or max_num_batched_tokens, raise gpu_memory_share, or free some"
        )
    return room // block_bytes


def requested_length(config: EngineConfig, model: ModelConfig) -> int:
    """Return how long sequences are to be at most. Raises ``UnsupportedModel`` if the model does not reach so far."""
    asked = config.checkpoint.max_model_len
    if asked is not None and asked > model.max_position:
        raise UnsupportedModel(f"max_model_len is {asked}, but the model knows only {model.max_position} positions")
    return asked or model.max_position


def possible_length(config: EngineConfig, requested: int, capacity: int) -> int:
    """Return the longest sequence that fits alone, so that nothing admitted can ever be stuck."""
    if config.checkpoint.max_model_len is not None and requested > capacity:
        raise UnsupportedModel(
            f"max_model_len is {requested}, but the KV cache holds {capacity} tokens; lower it or add KV blocks"
        )
    return min(requested, capacity)
