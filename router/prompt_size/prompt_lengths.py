# How long a prompt is: at the least in tokens, and in characters. The context check rests on the lower bound, so that
# no request is refused wrongly.

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

from protocol.chat import ChatRequest, Message, TextPart
from protocol.completions import CompletionRequest, Prompts
from protocol.embeddings import EmbeddingRequest, RerankRequest
from protocol.inference import Request
from protocol.media.audio import RealtimeRequest, SpeechRequest, TranscriptionRequest
from protocol.media.images import ImageRequest

# The longest token of public vocabularies is 128 spaces (cl100k, o200k, Llama 3); twice that, for those unseen.
LONGEST_TOKEN_BYTES = 256
_PIECE = 1 << 20  # bytes looked at together when words are counted
# Every byte to "s" (white space) or "w" (part of a word).
_WORD_MAP = bytes(ord("s") if chr(byte) in " \t\n\r\v\f" else ord("w") for byte in range(256))


def prompt_tokens_least(request: Request, enough: int | None = None) -> int:
    """Return a number of tokens that the longest single prompt of the request has at the least.

    Tokenizers of the field split at white space before anything else, so each word is a token or more; without
    spaces, each ``LONGEST_TOKEN_BYTES`` are. Prompts given as token ids count exactly. Counting may stop once it has
    found ``enough``.
    """
    match request:
        case ChatRequest():
            return _texts_least((text for message in request.messages for text in _texts(message)), enough)
        case CompletionRequest():
            return max((_prompt_least(prompt, enough) for prompt in prompts_of(request.prompt)), default=0)
        case EmbeddingRequest():
            return max((_prompt_least(prompt, enough) for prompt in prompts_of(request.input)), default=0)
        case RerankRequest():
            return _texts_least((request.query,), enough)  # of each document the model may cut off what is too long
        case ImageRequest():
            return _texts_least((request.prompt,), enough)
        case SpeechRequest():
            return _texts_least((request.input,), enough)
        case TranscriptionRequest():
            return _texts_least((request.prompt or "",), enough)
        case RealtimeRequest():
            return 0


def prompt_characters(request: Request) -> int:
    """Return the length of everything written in the request in characters (or token ids), images left out."""
    match request:
        case ChatRequest():
            size = 0
            for message in request.messages:
                content = message.content
                size += len(content) if isinstance(content, str) else sum(map(len, _texts(message)))
            return size
        case CompletionRequest():
            return sum(len(prompt) for prompt in prompts_of(request.prompt)) + len(request.suffix or "")
        case EmbeddingRequest():
            return sum(len(prompt) for prompt in prompts_of(request.input))
        case RerankRequest():
            return sum(map(len, request.texts)) + len(request.query) * len(request.documents)
        case ImageRequest():
            return len(request.prompt)
        case SpeechRequest():
            return len(request.input) + len(request.instructions or "")
        case TranscriptionRequest():
            return len(request.prompt or "")
        case RealtimeRequest():
            return 0


def number_of_prompts(request: Request) -> int:
    """Return how many prompts, or inputs, a request has."""
    match request:
        case ChatRequest() | ImageRequest() | SpeechRequest() | TranscriptionRequest() | RealtimeRequest():
            return 1
        case CompletionRequest():
            return len(prompts_of(request.prompt))
        case EmbeddingRequest():
            return len(prompts_of(request.input))
        case RerankRequest():
            return len(request.documents)  # each is read with the query


def byte_length(text: str) -> int:
    """Return the length of ``text`` in UTF-8 bytes."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def prompts_of(given: Prompts) -> list[str | list[int]]:
    """Return the prompts of a request that may have one or several, as texts or token ids."""
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):
        return [cast(list[int], given)]
    return cast(list[str | list[int]], given)


def _prompt_least(prompt: str | list[int], enough: int | None) -> int:
    return _texts_least((prompt,), enough) if isinstance(prompt, str) else len(prompt)


def _texts(message: Message) -> Iterator[str]:
    if isinstance(message.content, str):
        yield message.content
    else:
        for part in message.content or ():
            if isinstance(part, TextPart):
                yield part.text


def _texts_least(texts: Iterable[str], enough: int | None) -> int:
    words = size = 0
    for text in texts:
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE].encode("utf-8", "surrogatepass")
            # A word cut by the end of a piece or of a text counts once, or not at all: less is always right.
            words += piece.translate(_WORD_MAP).count(b"ws")
            size += len(piece)
            if enough is not None and words > enough:
                return words
    return max(words, -(-size // LONGEST_TOKEN_BYTES))
