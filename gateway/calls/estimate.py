# What a call probably used, when its upstream did not say: a reply that was cut, or one without a usage report.

from __future__ import annotations

from msgspec.structs import replace

from protocol.chat import ChatReply
from protocol.completions import CompletionReply
from protocol.events import Delta
from protocol.inference import Request, WholeReply
from protocol.usage import Usage
from router.catalog.targets import ModelSpec
from router.prompt_size.bounds import (
    SPEECH_CHARACTERS,
    SPEECH_TOKENS,
    input_tokens_most,
    output_tokens_most,
    pieces_likely,
    requests_made,
)
from router.prompt_size.prompt_bounds import USUAL_TOKEN_BYTES, PromptBound, prompt_tokens_likely, shown_tokens
from router.prompt_size.prompt_lengths import prompt_tokens_least

LONGEST_USUAL_TOKEN = 16  # bytes


def probable_prompt_tokens(request: Request) -> int:
    """Return about how many tokens a prompt has, and no less than it must."""
    return max(prompt_tokens_least(request), prompt_tokens_likely(request))


def charged_prompt_tokens(request: Request, model: ModelSpec, prompt: PromptBound | None) -> int:
    """Return about how many tokens a prompt has, for the ledger: what is only estimated never exceeds its hold.

    ``prompt`` is what was held; unsaid, its bytes.
    """
    probable = probable_prompt_tokens(request) * requests_made(request, model)
    return min(probable, input_tokens_most(request, model, prompt))


def heard_tokens(prompt: PromptBound | None, charged: int) -> int:
    """Return about how many tokens of a prompt are of recordings. ``prompt`` is what was held."""
    return min(charged, prompt.heard[1]) if prompt is not None and prompt.is_heard else 0


def filled_in(request: Request, model: ModelSpec, prompt: PromptBound | None, told: Usage | None) -> Usage:
    """Return what a call without words in its answer used: what its upstream told, and about what it left unsaid, as
    far as that is priced. ``prompt`` as in ``charged_prompt_tokens``."""
    told, likely, price = told or Usage(), pieces_likely(request), model.price
    tokens = min(likely.output_tokens, output_tokens_most(request, model, prompt))
    charged = told.input_tokens or charged_prompt_tokens(request, model, prompt)
    return replace(
        told,
        input_tokens=charged,
        audio_input_tokens=told.audio_input_tokens or heard_tokens(prompt, charged),
        image_input_tokens=told.image_input_tokens or min(shown_tokens(request), charged),
        output_tokens=told.output_tokens or tokens,
        search_units=told.search_units or (likely.search_units if price.search_unit else 0),
        images=told.images or (likely.images if price.image else 0),
        characters=told.characters or (likely.characters if price.character else 0),
        audio_seconds=told.audio_seconds or (likely.audio_seconds if price.audio_second else 0),
        extra_requests=requests_made(request, model) - 1,
    )


def tokens_of(delta: Delta) -> int:
    """Return how many tokens a delta stands for: those it names; else one for a piece that may be a token, and by its
    bytes for one that is too long for that."""
    if delta.token_ids:
        return len(delta.token_ids)
    words = delta.text + delta.refusal + delta.reasoning
    size = len(words) if words.isascii() else len(words.encode())
    if delta.tool_calls:
        size += sum(len(call.arguments.encode()) + len(call.name or "") for call in delta.tool_calls)
    if size > LONGEST_USUAL_TOKEN:
        return -(-size // USUAL_TOKEN_BYTES)
    return 1 if size else int(delta.has_content)


def spoken_tokens(transcript: str) -> int:
    """Return about how many tokens the sound of a transcript has, beside those of its words."""
    return -(-len(transcript) * SPEECH_TOKENS // SPEECH_CHARACTERS)


def probable_usage(request: Request, whole: WholeReply, most: int) -> Usage:
    """Return about what a whole reply without a usage report used; ``most``: output tokens that its hold covers."""
    size = spoken = 0
    match whole:
        case ChatReply():
            for message in (choice.message for choice in whole.choices):
                transcript = "" if message.audio is None else message.audio.transcript
                spoken += spoken_tokens(transcript)
                words = (message.content, message.refusal, message.reasoning_content, transcript)
                size += sum(len((text or "").encode()) for text in words)
                for call in message.tool_calls or ():
                    size += len(call.function.name) + len(call.function.arguments.encode())
        case CompletionReply():
            size = sum(len(choice.text.encode()) for choice in whole.choices)
    output = min(most, -(-size // USUAL_TOKEN_BYTES) + spoken)
    prompt = probable_prompt_tokens(request)
    return Usage(input_tokens=prompt, output_tokens=output, audio_output_tokens=min(spoken, output))
