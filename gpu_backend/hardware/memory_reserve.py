# What a step takes beside the weights and the KV cache, at most: activations of its tokens, logits of its rows, and
# what penalties and reports make of them. It is left free when KV blocks are counted: no step runs out of memory.

from __future__ import annotations

from gpu_backend.kernels.layout.paged import INVARIANT_SPLITS, choose_splits
from gpu_backend.models.config.model import ModelConfig
from gpu_backend.step.config import EngineConfig

ROWS_TO_SCORE = 128  # logits of so many positions exist at once where a prompt is scored
# Of each logit: as the model has it, in float32, as it was before adjustments, the counts of tokens in reply and prompt
# and what repetition makes of it, each for a moment beside the others.
LOGIT_BYTES = 48
SCORED_LOGIT_BYTES = 16  # where they are only reported


def memory_reserve_bytes(config: EngineConfig, model: ModelConfig, itemsize: int, max_model_len: int) -> int:
    """Return the bytes of the largest step on one rank, whose numbers have ``itemsize`` bytes."""
    drafts = 0 if config.speculation.speculative_method == "off" else config.speculation.num_speculative_tokens
    tokens = config.steps.max_num_batched_tokens
    rows = min(tokens, config.steps.max_num_seqs * (1 + drafts))
    logits = model.vocab_size * max(rows * LOGIT_BYTES, min(tokens, ROWS_TO_SCORE) * SCORED_LOGIT_BYTES)
    attention = 3 * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim  # before and after rope, and packed
    inner = 3 * model.intermediate_size
    if model.experts is not None:  # inner rows, and what each of a token's experts adds, in float32 on a CPU
        each = model.experts.intermediate_size * 3 + model.hidden_size * 2
        inner = max(inner, model.experts.per_token * each + 3 * model.experts.shared_size)
    activations = 6 * model.hidden_size + max(attention, inner)
    # A chunk of a long prompt: what each part of its context comes to, in float32, before they are put together.
    splits = INVARIANT_SPLITS if config.device.batch_invariant else choose_splits(1, 1, 1, max_model_len, processors=0)
    parts = splits * model.num_heads * (model.head_dim + 1) * 4 if splits > 1 else 0
    return tokens * (activations * itemsize + parts) + logits
