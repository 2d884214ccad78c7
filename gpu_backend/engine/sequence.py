# One reply being generated: its tokens, its place in the KV cache, and how its tokens are chosen.

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence stopped."""

    STOP = "stop"  # an end-of-sequence token, a stop token, or a stop string seen by the front end
    LENGTH = "length"  # max_tokens, or the model's context is full
    ABORT = "abort"  # the caller left or cancelled
    ERROR = "error"  # this request alone could not be served; the engine goes on


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen from the logits.

    ``temperature`` 0 means the most likely token. ``seed`` makes the noise a function of (seed, reply index, position),
    so equal logits give equal tokens whatever else is in the batch.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives to report beside the chosen token; None: no logprobs at all
