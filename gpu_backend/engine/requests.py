# Requests as they arrive: what makes one impossible to serve, and the sequences that a possible one becomes. Pure.

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from gpu_backend.scheduling.admission import TIERS
from gpu_backend.step.limits import Limits
from gpu_backend.step.messages import (
    LEAST_WEIGHT,
    MOST_WEIGHT,
    PRIORITIES,
    Embed,
    Embedding,
    Event,
    FinishReason,
    Generate,
    NewTokens,
)
from gpu_backend.step.sampling_params import SamplingParams
from gpu_backend.step.sequence import ReplyTimes, Sequence


def find_problem(request: Generate | Embed, limits: Limits) -> str | None:
    """Say why a request can never be served, and what would be right; None if it can."""
    known = request.prompt_token_ids
    room = limits.max_model_len
    if isinstance(request, Generate):
        known += request.resume_token_ids
        room -= 1  # for the first token of the reply
        if problem := _sampling_problem(request, limits):
            return problem
    if not request.prompt_token_ids:
        return "the prompt is empty; it needs at least one token"
    if len(known) > room:
        return f"the prompt has {len(known)} tokens; this engine takes at most {room}"
    if not 0 <= min(known) <= max(known) < limits.vocab_size:
        return f"the prompt has token ids outside the vocabulary of {limits.vocab_size}"
    if request.tier not in TIERS:
        return f"the tier is {request.tier!r}; it is one of {', '.join(TIERS)}"
    if request.priority not in PRIORITIES:
        return f"the priority is {request.priority!r}; it is one of {', '.join(PRIORITIES)}"
    if not LEAST_WEIGHT <= request.weight <= MOST_WEIGHT:
        return f"the weight is {request.weight}; it is a number from {LEAST_WEIGHT} to {MOST_WEIGHT}"
    return None


def _sampling_problem(request: Generate, limits: Limits) -> str | None:
    sampling = request.sampling
    if request.n < 1 or (request.n > 1 and request.resume_token_ids):
        return f"n is {request.n}; it is at least 1, and exactly 1 to resume a reply"
    if len(request.resume_token_ids) >= sampling.max_tokens:
        return f"max_tokens is {sampling.max_tokens}; it must be more than the {len(request.resume_token_ids)} resumed"
    if not sampling.temperature >= 0:
        return f"temperature is {sampling.temperature}; it is a number from 0 up"
    if not (0 <= sampling.top_p <= 1 and 0 <= sampling.min_p <= 1):
        return f"top_p is {sampling.top_p} and min_p {sampling.min_p}; both lie between 0 and 1"
    if sampling.top_k < 0:
        return f"top_k is {sampling.top_k}; it is at least 1, or 0 for no limit"
    if not 0 < sampling.repetition_penalty < math.inf:
        return f"repetition_penalty is {sampling.repetition_penalty}; it is a number above 0"
    if not (math.isfinite(sampling.presence_penalty) and math.isfinite(sampling.frequency_penalty)):
        return "presence_penalty and frequency_penalty are finite numbers"
    if not all(0 <= id_ < limits.vocab_size and math.isfinite(bias) for id_, bias in sampling.logit_bias):
        return f"logit_bias gives tokens from 0 to {limits.vocab_size - 1} a finite number each"
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        return f"min_tokens is {sampling.min_tokens}; it lies between 0 and max_tokens, {sampling.max_tokens}"
    return None


def refusal(request: Generate | Embed, problem: str, *, is_bad_grammar: bool = False) -> list[Event]:
    """Answer every reply that was asked for with the problem."""
    if isinstance(request, Embed):
        return [Embedding(request.request_id, error=problem)]
    return [
        NewTokens(
            request.request_id,
            request.first_reply + index,
            (),
            finish_reason=FinishReason.ERROR,
            error=problem,
            is_bad_grammar=is_bad_grammar,
        )
        for index in range(max(request.n, 1))
    ]


def make_sequences(
    request: Generate | Embed, limits: Limits, ids: Iterator[int], now: float, step: int
) -> list[Sequence]:
    """Make the sequences of a request that comes ``now``, after so many steps: one per reply, with the model's end
    tokens among their stop tokens.
    """
    if isinstance(request, Embed):
        times = ReplyTimes(now, step)
        return [Sequence(next(ids), request, SamplingParams(max_tokens=0), limits.max_model_len, times)]
    sampling = request.sampling
    if not sampling.ignore_eos:
        sampling = replace(sampling, stop_token_ids=sampling.stop_token_ids | limits.eos_token_ids)
    limit = min(len(request.prompt_token_ids) + sampling.max_tokens, limits.max_model_len)
    replies = [
        Sequence(next(ids), request, sampling, limit, ReplyTimes(now, step), number)
        for number in range(request.first_reply, request.first_reply + request.n)
    ]
    replies[0].token_ids.extend(request.resume_token_ids)
    return replies
