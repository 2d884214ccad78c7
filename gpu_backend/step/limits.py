# What an engine can hold: known once the model is loaded, asked wherever a request or a draft is judged.

from __future__ import annotations

from dataclasses import dataclass

from gpu_backend.step.cost import ASSUMED_COSTS, StepCost


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded model and its KV cache can hold."""

    max_model_len: int  # tokens of a prompt and its reply
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    num_host_blocks: int = 0
    assumed_cost: StepCost = ASSUMED_COSTS["cuda"]  # judges whether drafts pay where no cost is known
    copy_seconds: float | None = None  # of a KV block to host memory or back; None: preempted sequences are not copied
    draft_share: float = 0.0  # what a step of the draft model takes, of one of the model's
