# What clients may ask of the engine: OpenAI's bodies with our extensions, and the checks that turn them into sampling
# parameters. Everything is checked here, before the engine hears of a request; each refusal names its field.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from msgspec import Struct

from gpu_backend.engine.messages import LEAST_WEIGHT, MOST_WEIGHT
from gpu_backend.engine.sampling_params import Grammar, SamplingParams
from gpu_backend.server.checkpoint import SamplingDefaults
from protocol.chat import ChatRequest
from protocol.completions import CompletionRequest
from protocol.decoding import convert, decode_with_extra
from protocol.embeddings import EmbeddingRequest
from protocol.errors import BadRequest, UnsupportedParameter

MAX_REPLIES = 128  # n
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 4096  # of one stop string
MAX_STOP_TOKENS = 1024
MAX_BIASES = 1024  # tokens in a logit_bias
MOST_REPETITION_PENALTY = 10
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
    return_token_ids: bool = False
    return_gpu_seconds: bool = False
    resume_token_ids: tuple[int, ...] = ()
    resume_text_chars: int = 0


NO_EXTENSIONS = Extensions()


class Sender(Struct, frozen=True):
    """Who asks, as the gateway's headers say."""

    tenant: str = ""
    weight: float = 1.0
    tier: str = "interactive"
    deadline_ms: int | None = None
    fails_over: bool = False  # it asks another replica to go on, so it wants to hear at once of an engine that died


GeneratingRequest = ChatRequest | CompletionRequest
T = TypeVar("T", ChatRequest, CompletionRequest, EmbeddingRequest)


def read_body(body: bytes, type: type[T]) -> tuple[T, Extensions]:
    """Decode a body and our own fields in it; a field that nobody here knows is refused rather than ignored."""
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
    """Read x-tenant, x-weight, x-tier, x-deadline-ms and x-fails-over."""
    tier = headers.get("x-tier", "interactive")
    if tier not in ("interactive", "batch"):
        raise _invalid("x-tier", f"'x-tier' is {tier[:40]!r}; it is 'interactive' or 'batch'.")
    weight = _number_header(headers, "x-weight", float, MOST_WEIGHT)
    deadline = _number_header(headers, "x-deadline-ms", int, MOST_DEADLINE)
    fails_over = headers.get("x-fails-over", "0")
    if fails_over not in ("0", "1"):
        raise _invalid("x-fails-over", f"'x-fails-over' is {fails_over[:40]!r}; it is '0' or '1'.")
    return Sender(
        tenant=headers.get("x-tenant", ""),
        weight=1.0 if weight is None else max(weight, LEAST_WEIGHT),
        tier=tier,
        deadline_ms=deadline,
        fails_over=fails_over == "1",
    )


def check_chat(body: ChatRequest, extensions: Extensions) -> None:
    """Refuse what only chat requests can get wrong, and what this engine cannot do yet."""
    if not body.messages:
        raise _invalid("messages", "'messages' is empty; it needs at least one message.")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise _invalid(
            "max_tokens", "'max_tokens' and 'max_completion_tokens' mean the same and differ here. Send one of them."
        )
    if body.reasoning_effort not in (None, "none"):
        raise _unsupported("reasoning_effort", "This model's effort cannot be set. Leave 'reasoning_effort' out.")
    if body.top_logprobs is not None:
        _check_span("top_logprobs", body.top_logprobs, 0, 20)
        if not body.logprobs:
            raise _invalid("top_logprobs", "'top_logprobs' needs 'logprobs': true.")
    _check_both(body, extensions)


def check_completion(body: CompletionRequest, extensions: Extensions) -> None:
    """Refuse what only completion requests can get wrong, and what this engine cannot do."""
    if body.suffix:
        raise _unsupported("suffix", "This engine cannot fill in before a suffix. Leave 'suffix' out.")
    if body.best_of not in (None, body.n or 1):
        raise _unsupported("best_of", "'best_of' must equal 'n': this engine returns every reply it makes.")
    if body.logprobs is not None:
        _check_span("logprobs", body.logprobs, 0, 5)
    if body.echo and extensions.resume_token_ids:
        raise _unsupported("echo", "A continued reply does not echo its prompt. Leave 'echo' out.")
    _check_both(body, extensions)


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


def _check_both(body: GeneratingRequest, extensions: Extensions) -> None:
    _check_span("temperature", body.temperature, 0, 2)
    _check_span("top_p", body.top_p, 0, 1)
    _check_span("min_p", extensions.min_p, 0, 1)
    _check_span("top_k", extensions.top_k, -1, 2**31 - 1)
    _check_span("n", body.n, 1, MAX_REPLIES)
    _check_span("seed", body.seed, -(2**63), 2**63 - 1)
    _check_span("presence_penalty", body.presence_penalty, -2, 2)
    _check_span("frequency_penalty", body.frequency_penalty, -2, 2)
    _check_span("resume_text_chars", extensions.resume_text_chars, 0, 2**31 - 1)
    least = 0 if isinstance(body, CompletionRequest) else 1  # as OpenAI's: with an echo, the prompt's scores alone
    _check_span("max_tokens", body.max_tokens, least, 2**31 - 1)
    if isinstance(body, ChatRequest):
        _check_span("max_completion_tokens", body.max_completion_tokens, 1, 2**31 - 1)
    _check_min_tokens(body, extensions)
    if extensions.repetition_penalty is not None and not 0 < extensions.repetition_penalty <= MOST_REPETITION_PENALTY:
        raise _invalid(
            "repetition_penalty",
            f"'repetition_penalty' is {extensions.repetition_penalty:g}; it must be above 0, at most "
            f"{MOST_REPETITION_PENALTY}, and 1 changes nothing.",
        )
    _check_stops(stop_strings(body))
    if len(extensions.stop_token_ids) > MAX_STOP_TOKENS:
        message = f"'stop_token_ids' holds {len(extensions.stop_token_ids)} tokens; it holds at most {MAX_STOP_TOKENS}."
        raise _invalid("stop_token_ids", message)
    if body.stream_options is not None and not body.stream:
        raise _invalid("stream_options", "'stream_options' is for streams: send 'stream': true with it.")
    if extensions.resume_token_ids and (body.n or 1) > 1:
        raise _invalid("n", "'n' must be 1 with 'resume_token_ids': one reply is continued.")
    if extensions.resume_text_chars and not extensions.resume_token_ids:
        raise _invalid("resume_text_chars", "'resume_text_chars' needs 'resume_token_ids'.")


def check_bias(bias: Mapping[str, float] | None, vocab_size: int) -> None:
    """Raise ``BadRequest`` unless each key is a token of the model, written in digits, and each value -100 to 100."""
    if bias and len(bias) > MAX_BIASES:
        raise _invalid("logit_bias", f"'logit_bias' names {len(bias)} tokens; it names at most {MAX_BIASES}.")
    for token, value in (bias or {}).items():
        if not (token.isascii() and token.isdigit() and str(int(token[:20])) == token and int(token) < vocab_size):
            raise _invalid(
                "logit_bias",
                f"'logit_bias' names the token {token[:40]!r}; this model's are the numbers 0 to {vocab_size - 1}.",
            )
        if not -100 <= value <= 100:
            raise _invalid("logit_bias", f"'logit_bias' gives token {token} {value:g}; it must be -100 to 100.")


def _check_min_tokens(body: GeneratingRequest, extensions: Extensions) -> None:
    _check_span("min_tokens", extensions.min_tokens, 0, 2**31 - 1)
    if body.output_limit is not None and extensions.min_tokens > body.output_limit:
        raise _invalid(
            "min_tokens", f"'min_tokens' is {extensions.min_tokens}, more than the {body.output_limit} of 'max_tokens'."
        )


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise _invalid("stop", f"'stop' holds {len(stops)} strings; it holds at most {MAX_STOPS}.")
    if not all(stops):
        raise _invalid("stop", "'stop' holds an empty string, which would end every reply at once.")
    if (longest := max(map(len, stops), default=0)) > MAX_STOP_CHARACTERS:
        raise _invalid("stop", f"'stop' holds a text of {longest} characters; each has at most {MAX_STOP_CHARACTERS}.")


def _check_span(name: str, value: float | None, least: int, most: int) -> None:
    if value is not None and not least <= value <= most:
        raise _invalid(name, f"'{name}' is {value}; it must be {least} to {most}.")


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
        raise _invalid(name, f"'{name}' is {value[:40]!r}; it must be a {whole}number above 0, at most {most}.")
    return number


def _invalid(param: str, message: str) -> BadRequest:
    return BadRequest(message, param=param, code="invalid_value")


def _unsupported(param: str, message: str) -> UnsupportedParameter:
    return UnsupportedParameter(message, param=param)
