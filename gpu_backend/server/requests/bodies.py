# What clients may ask of the engine: OpenAI's bodies with our extensions, the gateway's headers, and the sampling
# parameters that they come to.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct

from gpu_backend.server.checkpoint.checkpoint import SamplingDefaults
from gpu_backend.server.requests.transfer import TransferParams
from gpu_backend.step.messages import LEAST_WEIGHT, MOST_WEIGHT, PRIORITIES
from gpu_backend.step.sampling_params import Grammar, SamplingParams
from protocol.chat import ChatRequest
from protocol.completions import CompletionRequest
from protocol.decoding import convert, decode_with_extra
from protocol.embeddings import EmbeddingRequest
from protocol.errors import UnsupportedParameter, invalid_param
from protocol.serving.prompt_marks import PROMPT_MARKS

FAIRNESS_ID = "x-gateway-inference-fairness-id"
MOST_DEADLINE = 2**31 - 1  # milliseconds: 24 days
SMALLEST_TOP_P = 1e-6  # keeps exactly the most likely token, as top_p 0 asks


class StructuredOutputs(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What vLLM calls the ``guided_…`` fields since its version 0.11."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Extensions(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Fields beyond OpenAI's that both generating routes understand."""

    top_k: int | None = None
    min_p: float | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    repetition_penalty: float | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: tuple[str, ...] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    ebnf: str | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    return_token_ids: bool = False
    return_gpu_seconds: bool = False
    resume_token_ids: tuple[int, ...] = ()
    resume_text_chars: int = 0
    kv_transfer_params: TransferParams | None = None


NO_EXTENSIONS = Extensions()


class Sender(Struct, frozen=True):
    """Who asks, as the gateway's headers say."""

    tenant: str = ""
    weight: float = 1.0
    tier: str = "interactive"
    priority: str = "normal"
    deadline_ms: int | None = None
    fails_over: bool = False  # it asks another replica to go on, so it wants to hear at once of an engine that died
    marks: str = ""  # of the prompt's beginnings, by which its gateway knows which of them are cached here


GeneratingRequest = ChatRequest | CompletionRequest
T = TypeVar("T", ChatRequest, CompletionRequest, EmbeddingRequest)


def read_body(body: bytes, type: type[T]) -> tuple[T, Extensions]:
    """Decode a body and Tollgate's own fields in it; a field that is unknown here is refused rather than ignored."""
    request, extra = decode_with_extra(body, type)
    if not extra:
        return request, NO_EXTENSIONS
    known: frozenset[str] = (
        frozenset() if isinstance(request, EmbeddingRequest) else frozenset(Extensions.__struct_fields__)
    )
    if unknown := extra.keys() - known:
        name = min(unknown)
        raise UnsupportedParameter(f"This engine does not know the parameter '{name}'. Leave it out.", param=name)
    return request, convert({name: value for name, value in extra.items() if value is not None}, Extensions)


def read_sender(headers: Mapping[str, str]) -> Sender:
    """Read x-tenant, or x-gateway-inference-fairness-id where a router sends that alone; and x-weight, x-tier,
    x-priority, x-deadline-ms, x-fails-over and x-prompt-marks."""
    tier = headers.get("x-tier", "interactive")
    if tier not in ("interactive", "batch"):
        raise invalid_param("x-tier", f"'x-tier' is {tier[:40]!r}; it is 'interactive' or 'batch'.")
    priority = headers.get("x-priority", "normal")
    if priority not in PRIORITIES:
        raise invalid_param("x-priority", f"'x-priority' is {priority[:40]!r}; it is one of {', '.join(PRIORITIES)}.")
    weight = _number_header(headers, "x-weight", float, MOST_WEIGHT)
    deadline = _number_header(headers, "x-deadline-ms", int, MOST_DEADLINE)
    fails_over = headers.get("x-fails-over", "0")
    if fails_over not in ("0", "1"):
        raise invalid_param("x-fails-over", f"'x-fails-over' is {fails_over[:40]!r}; it is '0' or '1'.")
    return Sender(
        tenant=headers.get("x-tenant") or headers.get(FAIRNESS_ID, ""),
        weight=1.0 if weight is None else max(weight, LEAST_WEIGHT),
        tier=tier,
        priority=priority,
        deadline_ms=deadline,
        fails_over=fails_over == "1",
        marks=headers.get(PROMPT_MARKS, ""),
    )


def sampling_of(
    body: GeneratingRequest,
    extensions: Extensions,
    max_tokens: int,
    logprobs: int | None,
    eos_token_ids: frozenset[int],
    defaults: SamplingDefaults,
    draw_seed: Callable[[], int],
    grammar: Grammar | None = None,
) -> SamplingParams:
    """Return how the reply's tokens are chosen; ``body`` has passed its check. Without a seed, one is drawn."""
    top_p = defaults.top_p if body.top_p is None else body.top_p
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_p=max(top_p, SMALLEST_TOP_P),
        top_k=defaults.top_k
        if extensions.top_k is None
        else max(extensions.top_k, 0),  # -1 is vLLM's word for no limit
        min_p=defaults.min_p if extensions.min_p is None else extensions.min_p,
        seed=draw_seed() if body.seed is None else body.seed,
        stop_token_ids=frozenset(extensions.stop_token_ids) | (frozenset() if extensions.ignore_eos else eos_token_ids),
        ignore_eos=extensions.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=logprobs if isinstance(body, CompletionRequest) and body.echo else None,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=defaults.repetition_penalty
        if extensions.repetition_penalty is None
        else extensions.repetition_penalty,
        logit_bias=tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items() if bias),
        min_tokens=min(extensions.min_tokens, max_tokens),
        grammar=grammar,
    )


def stop_strings(body: GeneratingRequest) -> tuple[str, ...]:
    """Return the stop strings, however they were written."""
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def _number_header(headers: Mapping[str, str], name: str, kind: Callable[[str], Any], most: int) -> Any:
    value = headers.get(name)
    if value is None:
        return None
    try:
        number = kind(value)
    except ValueError:
        number = math.nan
    if not 0 < number <= most:
        whole = "whole " if kind is int else ""
        raise invalid_param(name, f"'{name}' is {value[:40]!r}; it must be a {whole}number above 0, at most {most}.")
    return number
