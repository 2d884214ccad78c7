# What an answer of `tollgate doctor --live` shows: whether usage, ends, calls and refusals are what the format and the
# prices take for granted. Values in, words out.

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import msgspec
from msgspec import Struct

from billing.core.money import NanoDollars, to_text
from gateway.doctor.live_calls import LiveCall
from gateway.upstreams.wire.errors import UpstreamFailure, UpstreamRefused
from protocol.chat import ChatReply, FinishReason
from protocol.sse import EventReader
from protocol.usage import Usage

# Leaves of a usage that are counted, or that cost nothing by themselves.
COUNTED = frozenset(
    {"prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens", "reasoning_tokens", "cost", "text_tokens"}
    | {
        "accepted_prediction_tokens",
        "rejected_prediction_tokens",
        "prompt_cache_hit_tokens",
        "prompt_cache_miss_tokens",
    }
    | {"input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "thinking_tokens"}
    | {"ephemeral_5m_input_tokens", "ephemeral_1h_input_tokens", "cache_write_tokens", "image_tokens"}
    | {"promptTokenCount", "candidatesTokenCount", "totalTokenCount", "thoughtsTokenCount", "cachedContentTokenCount"}
    | {"inputTokens", "outputTokens", "totalTokens", "cacheReadInputTokens", "cacheWriteInputTokens"}
    | {"tokenCount", "queue_time", "prompt_time", "completion_time", "total_time", "upstream_inference_cost"}
    | {"upstream_inference_prompt_cost", "upstream_inference_completions_cost", "upstream_inference_input_cost"}
)
PARTS = (  # as each API has them: a part, and what it is of
    ("cached_tokens", "prompt_tokens"),
    ("reasoning_tokens", "completion_tokens"),
    ("cachedContentTokenCount", "promptTokenCount"),
)
SAME = Decimal("0.01")  # the share by which two sums of one call may differ


class Answered(Struct, frozen=True, kw_only=True):
    """What came of a call."""

    status: int
    body: bytes
    reply: ChatReply | None = None
    usage: Usage | None = None
    failure: UpstreamFailure | None = None  # as the format reads the answer


class Limits(Struct, frozen=True):
    """What a call's usage can be at the most, in tokens, and what it costs at the file's price."""

    prompt: int
    output: int
    cost: NanoDollars


def complaints(call: LiveCall, answered: Answered, limits: Limits, model: str) -> Iterator[str]:
    """Yield what is not as the format takes it for granted. ``model``: as the upstream was asked."""
    if call.shows in REFUSALS:
        yield from _refusal(call, answered)
    elif isinstance(answered.failure, UpstreamRefused) and call.shows == "thinking":
        return  # a model that does not think, and says so
    elif answered.failure is not None or answered.reply is None:
        yield f"no answer ({answered.status}): {getattr(answered.failure, 'message', 'nothing came')}"
    else:
        yield from _usage(call, answered, limits)
        yield from _content(call, answered.reply)
        named = named_model(answered.body)
        if named is not None and not _is_same(model, named):
            yield f"asked for {model}, it says that {named} answered"


def raw_usages(body: bytes) -> list[dict[str, Any]]:
    """Return each count in an answer, as the upstream wrote it, whole or streamed."""
    found = []
    for frame in _frames(body):
        inner = _message(frame)
        for told in (frame.get("usage"), frame.get("usageMetadata"), inner.get("usage")):
            if isinstance(told, dict):
                found.append(told)
    return found


def named_model(body: bytes) -> str | None:
    """Return the model that an answer names, if it does."""
    for frame in _frames(body):
        inner = _message(frame)
        for name in (frame.get("model"), frame.get("modelVersion"), inner.get("model")):
            if isinstance(name, str) and name:
                return name
    return None


def _message(frame: dict[str, Any]) -> dict[str, Any]:
    """Return the message inside of an event, where Anthropic's streams begin with one."""
    message = frame.get("message")
    return message if isinstance(message, dict) else {}


def _refusal(call: LiveCall, answered: Answered) -> Iterator[str]:
    outcomes, right = REFUSALS[call.shows]
    if answered.failure is None:
        yield f"{right}, and it answered {answered.status}"
    elif answered.failure.outcome not in outcomes:
        yield f"{right}; its {answered.status} is read as '{answered.failure.outcome}': {answered.failure.message}"


REFUSALS = {
    "unknown_model": (("not_found", "refused"), "an unknown model is to be refused"),
    "bad_value": (("refused",), "a value out of range is to be refused with a 400"),
    "bad_key": (("refused_key", "refused"), "a wrong key is to be refused with a 401 or 403"),
}


def _usage(call: LiveCall, answered: Answered, limits: Limits) -> Iterator[str]:
    usage = answered.usage
    if usage is None:
        yield "it tells no usage: such calls are charged by an estimate"
        return
    if not 0 < usage.input_tokens <= limits.prompt:
        yield f"usage tells {usage.input_tokens} tokens of a prompt that can have 1 to {limits.prompt}"
    if not 0 < usage.output_tokens <= limits.output:
        yield f"usage tells {usage.output_tokens} tokens of an answer that can have 1 to {limits.output}"
    counts = raw_usages(answered.body)
    for part, whole in PARTS:
        if any(_leaf(told, part) > _leaf(told, whole) for told in counts):
            yield f"usage tells more {part} than {whole}"
    if call.shows == "cache" and not usage.cached_input_tokens:
        yield "a long prompt that was sent twice was not read from a cache"
    if odd := sorted({name for told in counts for name in _uncounted(told)}):
        yield f"usage counts what no price is known of here: {', '.join(odd)}"
    told = [Decimal(str(count["cost"])) for count in counts if isinstance(count.get("cost"), int | float)]
    ours = Decimal(to_text(limits.cost))
    if told and abs(told[-1] - ours) > SAME * max(told[-1], ours):
        yield f"it says that this cost {told[-1]} USD, by the prices here it is {ours} USD"


def _leaf(told: dict[str, Any], name: str) -> float:
    """Return a number of a usage, at whatever depth; 0 without one."""
    own = told.get(name)
    if isinstance(own, int | float):
        return own
    return max((_leaf(each, name) for each in told.values() if isinstance(each, dict)), default=0)


def _content(call: LiveCall, reply: ChatReply) -> Iterator[str]:
    choice = reply.choices[0]
    words, calls = choice.message.content or choice.message.refusal or "", choice.message.tool_calls or ()
    if call.shows == "tools":
        if [each.function.name for each in calls] != ["weather"]:
            yield f"a tool that had to be called was not: {[each.function.name for each in calls]}"
        elif not _is_object(calls[0].function.arguments):
            yield "the arguments of a tool call are no JSON object"
    elif call.shows == "length" and choice.finish_reason is not FinishReason.LENGTH:
        yield f"an answer that is cut at its length ends with '{choice.finish_reason}'"
    elif call.shows == "json" and choice.finish_reason is not FinishReason.LENGTH and not _is_object(words):
        yield "an answer in JSON is none"
    elif not words.strip() and choice.finish_reason is not FinishReason.LENGTH:
        yield "an answer without words"


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except msgspec.DecodeError:
        return False


def _is_same(asked: str, named: str) -> bool:
    short = asked.rpartition("/")[2].removesuffix("-latest")
    return short in named or named.rpartition("/")[2] in asked


def _uncounted(told: dict[str, Any]) -> Iterator[str]:
    for name, value in told.items():
        if isinstance(value, dict):
            yield from _uncounted(value)
        elif isinstance(value, list):
            yield from (name for each in value if isinstance(each, dict) for name in _uncounted(each))
        elif isinstance(value, int | float) and not isinstance(value, bool) and value and name not in COUNTED:
            yield name


def _frames(body: bytes) -> list[dict[str, Any]]:
    texts = [body] if body.lstrip()[:1] == b"{" else [event.data for event in EventReader().feed(body + b"\n\n")]
    frames = []
    for text in texts:
        try:
            frame = msgspec.json.decode(text)
        except msgspec.DecodeError:
            continue
        if isinstance(frame, dict):
            frames.append(frame)
    return frames
