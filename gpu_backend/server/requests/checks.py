# The checks of what clients ask: what is wrong with a request is found here, before the engine hears of it, and each
# refusal names its field.

from __future__ import annotations

from collections.abc import Collection, Mapping

from gpu_backend.server.requests.bodies import Extensions, GeneratingRequest, stop_strings
from gpu_backend.server.requests.prompts import check_token_ids
from protocol.chat import ChatRequest, check_arguments
from protocol.completions import CompletionRequest
from protocol.errors import UnsupportedParameter, invalid_param

MAX_REPLIES = 128  # n
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 4096  # of one stop string
MAX_STOP_TOKENS = 1024
MAX_BIASES = 1024  # tokens in a logit_bias
MOST_REPETITION_PENALTY = 10


def check_chat(body: ChatRequest, extensions: Extensions, efforts: Collection[str] = ()) -> None:
    """Refuse what only chat requests can get wrong, and what this engine cannot do yet; ``efforts`` are the model's."""
    if not body.messages:
        raise invalid_param("messages", "'messages' is empty; it needs at least one message.")
    check_arguments(body)
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise invalid_param(
            "max_tokens", "'max_tokens' and 'max_completion_tokens' mean the same and differ here. Send one of them."
        )
    if body.reasoning_effort not in (None, "none", *efforts):
        known = f"is one of {', '.join(efforts)}" if efforts else "cannot be set"
        raise _unsupported("reasoning_effort", f"This model's effort {known}. Leave 'reasoning_effort' out.")
    if "audio" in (body.modalities or ()) or body.audio is not None:
        raise _unsupported("modalities", "This engine answers in words. Leave 'modalities' and 'audio' out.")
    if any(message.audio is not None for message in body.messages):
        raise _unsupported("messages", "This engine keeps no answers by voice. Send the transcript as 'content'.")
    if body.top_logprobs is not None:
        _check_span("top_logprobs", body.top_logprobs, 0, 20)
        if body.top_logprobs and not body.logprobs:
            raise invalid_param("top_logprobs", "'top_logprobs' needs 'logprobs': true.")
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


def check_tokens(body: GeneratingRequest, extensions: Extensions, vocab_size: int) -> None:
    """Raise ``BadRequest`` unless all tokens that a request names are the model's."""
    check_bias(body.logit_bias, vocab_size)
    check_token_ids(extensions.resume_token_ids, vocab_size, "resume_token_ids")
    check_token_ids(extensions.stop_token_ids, vocab_size, "stop_token_ids")


def check_bias(bias: Mapping[str, float] | None, vocab_size: int) -> None:
    """Raise ``BadRequest`` unless each key is a token of the model, written in digits, and each value -100 to 100."""
    if bias and len(bias) > MAX_BIASES:
        raise invalid_param("logit_bias", f"'logit_bias' names {len(bias)} tokens; it names at most {MAX_BIASES}.")
    for token, value in (bias or {}).items():
        if not (token.isascii() and token.isdigit() and str(int(token[:20])) == token and int(token) < vocab_size):
            raise invalid_param(
                "logit_bias",
                f"'logit_bias' names the token {token[:40]!r}; this model's are the numbers 0 to {vocab_size - 1}.",
            )
        if not -100 <= value <= 100:
            raise invalid_param("logit_bias", f"'logit_bias' gives token {token} {value:g}; it must be -100 to 100.")


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
        raise invalid_param(
            "repetition_penalty",
            f"'repetition_penalty' is {extensions.repetition_penalty:g}; it must be above 0, at most "
            f"{MOST_REPETITION_PENALTY}, and 1 changes nothing.",
        )
    _check_stops(stop_strings(body))
    if len(extensions.stop_token_ids) > MAX_STOP_TOKENS:
        message = f"'stop_token_ids' holds {len(extensions.stop_token_ids)} tokens; it holds at most {MAX_STOP_TOKENS}."
        raise invalid_param("stop_token_ids", message)
    if body.stream_options is not None and not body.stream:
        raise invalid_param("stream_options", "'stream_options' is for streams: send 'stream': true with it.")
    if extensions.resume_token_ids and (body.n or 1) > 1:
        raise invalid_param("n", "'n' must be 1 with 'resume_token_ids': one reply is continued.")
    if extensions.resume_text_chars and not extensions.resume_token_ids:
        raise invalid_param("resume_text_chars", "'resume_text_chars' needs 'resume_token_ids'.")


def _check_min_tokens(body: GeneratingRequest, extensions: Extensions) -> None:
    _check_span("min_tokens", extensions.min_tokens, 0, 2**31 - 1)
    if body.output_limit is not None and extensions.min_tokens > body.output_limit:
        raise invalid_param(
            "min_tokens", f"'min_tokens' is {extensions.min_tokens}, more than the {body.output_limit} of 'max_tokens'."
        )


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise invalid_param("stop", f"'stop' holds {len(stops)} strings; it holds at most {MAX_STOPS}.")
    if not all(stops):
        raise invalid_param("stop", "'stop' holds an empty string, which would end every reply at once.")
    if (longest := max(map(len, stops), default=0)) > MAX_STOP_CHARACTERS:
        raise invalid_param(
            "stop", f"'stop' holds a text of {longest} characters; each has at most {MAX_STOP_CHARACTERS}."
        )


def _check_span(name: str, value: float | None, least: int, most: int) -> None:
    if value is not None and not least <= value <= most:
        raise invalid_param(name, f"'{name}' is {value}; it must be {least} to {most}.")


def _unsupported(param: str, message: str) -> UnsupportedParameter:
    return UnsupportedParameter(message, param=param)
