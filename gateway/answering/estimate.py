# What a call probably used, when its upstream did not say: a reply that was cut, or one without a usage report.

from __future__ import annotations

from gateway.providers.base import Request, WholeReply
from protocol.chat import ChatReply
from protocol.completions import CompletionReply
from protocol.events import Delta
from protocol.usage import Usage
from router.bounds import prompt_tokens_least, prompt_tokens_most

BYTES_PER_TOKEN = 4  # of English text, in the common vocabularies


def probable_prompt_tokens(request: Request) -> int:
    """Return about how many tokens a prompt has: its most, a byte each, over the usual bytes of a token."""
    return max(prompt_tokens_least(request), prompt_tokens_most(request) // BYTES_PER_TOKEN)


def tokens_of(delta: Delta) -> int:
    """Return how many tokens a delta stands for: those it names, else one for each piece with content."""
    return len(delta.token_ids) or int(delta.has_content)


def probable_usage(request: Request, whole: WholeReply) -> Usage:
    """Return about what a whole reply without a usage report used."""
    text = 0
    match whole:
        case ChatReply():
            for choice in whole.choices:
                calls = choice.message.tool_calls or ()
                text += len((choice.message.content or "").encode())
                text += sum(len(call.function.name) + len(call.function.arguments.encode()) for call in calls)
        case CompletionReply():
            text = sum(len(choice.text.encode()) for choice in whole.choices)
    return Usage(input_tokens=probable_prompt_tokens(request), output_tokens=-(-text // BYTES_PER_TOKEN))
