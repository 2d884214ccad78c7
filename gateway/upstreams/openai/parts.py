# What whole replies and chunks in OpenAI's dialect have in common: reasons, counts, words, arguments, scores.

from __future__ import annotations

from hashlib import blake2s

import msgspec
from msgspec import Raw, Struct

from gateway.upstreams.wire.reading import NOTHING, count_of, object_in, read_usage, text_in
from protocol.chat import FinishReason, Spoken
from protocol.decoding import NOT_JSON
from protocol.usage import Usage

LONGEST_ID = 200  # characters of what tells replies apart
MOST_SECONDS = 1e6  # of device time in one call
_REASONS = {reason.value: reason for reason in FinishReason} | {"function_call": FinishReason.TOOL_CALLS}


def read_finish_reason(word: str) -> FinishReason:
    """Return the reason that an upstream's word means; older words and strangers count as a plain stop."""
    return _REASONS.get(word, FinishReason.STOP)


def told_usage(said: Raw) -> Usage | None:
    """Return what the upstream counted, or ``None`` where it told nothing or nonsense."""
    usage = read_usage(said, UsageObject)
    return None if usage is None else usage.usage()


def told_apart(ident: Raw, created: Raw) -> str:
    """Return what tells a reply from others: its id and when it was made, as far as that takes."""
    told = (text_in(field) or bytes(field).decode("utf-8", "replace") for field in (ident, created))
    return " ".join([field[:LONGEST_ID] for field in told])


def made_up_id(reply: str, choice: int, place: int) -> str:
    """Return an id for a call that a service gave none: results must name the call that they are of."""
    return "call_" + blake2s(f"{reply} {choice} {place}".encode(), digest_size=12).hexdigest()


def read_content(content: Content) -> tuple[str, str]:
    """Return the words of a message and the thinking among them: some services send both as a list of parts."""
    if content is None or isinstance(content, str):
        return content or "", ""
    said = "".join(text_in(part.text) or "" for part in content)
    return said, "".join(text_in(thought.text) or "" for part in content for thought in _thoughts(part.thinking))


def _thoughts(said: Raw) -> list[Thought]:
    try:
        return msgspec.json.decode(said, type=list[Thought]) if said is not NOTHING else []
    except NOT_JSON:
        return []


def read_arguments(arguments: Raw) -> str:
    """Return a call's arguments as the JSON text that the API specifies; some services send the object itself."""
    if arguments is NOTHING:
        return ""
    return text_in(arguments) or object_in(arguments)


def present(raw: Raw) -> Raw | None:
    """Return a field that was said, out of the buffer it came in, as text on one line: it may go out in an event's."""
    said = bytes(raw)
    if said in (b"", b"null"):
        return None
    if not said.isascii():  # not decoded yet: it may be no UTF-8, and what goes out must be
        said = said.decode("utf-8", "replace").encode()
    return Raw(msgspec.json.format(said, indent=-1) if b"\n" in said else said)


class TokenDetails(Struct, frozen=True):
    """What a count is made of."""

    cached_tokens: int | float | None = None
    cache_write_tokens: int | float | None = None
    reasoning_tokens: int | float | None = None
    audio_tokens: int | float | None = None


NO_DETAILS = TokenDetails()


class UsageObject(Struct, frozen=True):
    """The ``usage`` of a reply or a chunk."""

    prompt_tokens: int | float | None = 0
    completion_tokens: int | float | None = 0
    prompt_tokens_details: TokenDetails | None = None
    completion_tokens_details: TokenDetails | None = None
    gpu_seconds: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None

    def usage(self) -> Usage | None:
        """Return the counts, or ``None`` where they cannot be counts: then the reply itself is counted."""
        prompt, completion = count_of(self.prompt_tokens), count_of(self.completion_tokens)
        if not prompt or completion is None:  # no prompt is empty once a template is around it
            return None
        details = self.prompt_tokens_details or NO_DETAILS
        cached = part_of(details.cached_tokens, prompt)
        written = part_of(details.cache_write_tokens, prompt - cached)
        said = self.completion_tokens_details or NO_DETAILS
        reasoning = part_of(said.reasoning_tokens, completion)
        return Usage(
            input_tokens=prompt,
            cached_input_tokens=cached,
            output_tokens=completion,
            reasoning_tokens=reasoning,
            cache_write_tokens=written,
            audio_input_tokens=part_of(details.audio_tokens, prompt),
            audio_output_tokens=part_of(said.audio_tokens, completion - reasoning),
            gpu_seconds=seconds(self.gpu_seconds),
            prefill_ms=seconds(self.prefill_ms, MOST_SECONDS * 1000),
            decode_ms=seconds(self.decode_ms, MOST_SECONDS * 1000),
        )


def part_of(number: float | None, whole: int) -> int:
    """Return a part of a count: 0 for what cannot be one, and never more than the whole."""
    return min(count_of(number) or 0, whole) if number else 0


def seconds(number: float | None, most: float = MOST_SECONDS) -> float:
    """Return a time that an engine took, or 0 for what cannot be one."""
    return number if number is not None and 0.0 <= number <= most else 0.0


class Audio(Struct, frozen=True):
    """An answer by voice, or a piece of one."""

    id: str | None = None
    data: str | None = None
    transcript: str | None = None
    expires_at: int | float | None = None

    def spoken(self, transcript: str = "") -> Spoken:
        """Return it without its transcript, or with one."""
        return Spoken(self.id, self.data or "", count_of(self.expires_at), transcript)


class Part(Struct, frozen=True):
    """One part of a message's content, where it comes in parts."""

    text: Raw = NOTHING
    thinking: Raw = NOTHING


class Thought(Struct, frozen=True):
    text: Raw = NOTHING


Content = str | tuple[Part, ...] | None
