# How long sequences may be, and how many blocks of keys and values there are: as the memory allows beside the weights
# and what the largest step takes. That is left free when blocks are counted: no step runs out of memory.

from __future__ import annotations

import torch

from gpu_backend.kernels.layout.paged import INVARIANT_SPLITS, choose_splits
from gpu_backend.kernels.reference_delta import CHUNK
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import ModelConfig
from gpu_backend.models.config.vision import VisionConfig
from gpu_backend.models.towers.vision import KEPT_BYTES
from gpu_backend.step.config import EngineConfig

GPU_SPARE_BYTES = 512 * 1024**2  # what libraries take, and graphs
ROWS_TO_SCORE = 128  # logits of so many positions exist at once where a prompt is scored
# Of each logit: as the model has it, in float32, as it was before adjustments, the counts of tokens in reply and prompt
# and what repetition makes of it, each for a moment beside the others.
LOGIT_BYTES = 48
SCORED_LOGIT_BYTES = 16  # where they are only reported


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


def memory_reserve_bytes(config: EngineConfig, model: ModelConfig, itemsize: int, max_model_len: int) -> int:
    """Return the bytes of the largest step on one rank, whose numbers have ``itemsize`` bytes."""
    drafts = 0 if config.speculation.speculative_method == "off" else config.speculation.num_speculative_tokens
    tokens = config.steps.max_num_batched_tokens
    rows = min(tokens, config.steps.max_num_seqs * (1 + drafts))
    logits = model.vocab_size * max(rows * LOGIT_BYTES, min(tokens, ROWS_TO_SCORE) * SCORED_LOGIT_BYTES)
    attention = 3 * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim  # before and after rope, and packed
    if model.latent is not None:  # queries as they come, in two parts and together, what they see, and values
        attention += 2 * model.num_heads * model.latent.query_dim + 2 * model.attended_width
    if (linear := model.linear) is not None:  # in float32: what goes into the rule, and what chunks make of it
        attention = max(attention, 4 * (8 * linear.channels + 6 * CHUNK * linear.value_heads) // itemsize)
    inner = 3 * model.intermediate_size
    if model.experts is not None:  # inner rows, and what each of a token's experts adds, in float32 on a CPU
        each = model.experts.intermediate_size * 3 + model.hidden_size * 2
        inner = max(inner, model.experts.per_token * each + 3 * model.experts.shared_size)
    activations = 6 * model.hidden_size + max(attention, inner)
    if config.speculation.has_head:  # states of three layers, each by itself and together, and what is kept of them
        activations += 8 * model.hidden_size
    # A chunk of a long prompt: what each part of its context comes to, in float32, before they are put together.
    splits = INVARIANT_SPLITS if config.device.batch_invariant else choose_splits(1, 1, 1, max_model_len, processors=0)
    parts = splits * model.num_heads * (model.head_dim + 1) * 4 if splits > 1 else 0
    largest = tokens * (activations * itemsize + parts) + logits
    if model.vision is None or not config.pictures.max_images:
        return largest
    return largest + picture_bytes(model.vision, itemsize) + KEPT_BYTES


def picture_bytes(vision: VisionConfig, itemsize: int) -> int:
    """Return the bytes that a tower takes beside its weights to make vectors of the largest picture."""
    of_a_patch = 6 * vision.hidden_size + max(3 * vision.hidden_size, 4 * vision.intermediate_size)
    return vision.most_patches * of_a_patch * itemsize
