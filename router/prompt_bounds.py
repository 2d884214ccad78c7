# How many tokens a prompt has, told without a tokenizer: at the very most, probably, and at the least. The holds rest
# on the upper bound, so they are never too small; the context check rests on the lower one, so that nobody is refused
# wrongly.

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import msgspec

from protocol.chat import (
    ChatRequest,
    ContentPart,
    ImagePart,
    ImageUrl,
    JsonSchemaFormat,
    Message,
    RedactedThinkingBlock,
    RefusalPart,
    TextPart,
    ThinkingBlock,
    Tool,
)
from protocol.completions import CompletionRequest, Prompts
from protocol.embeddings import EmbeddingRequest
from router.abilities import InferenceRequest

# A byte-level tokenizer makes at most one token of each UTF-8 byte. What a chat template adds to that, in tokens:
TEMPLATE_TOKENS = 128  # begin and end marks, generation prompt, a default system message
MESSAGE_TOKENS = 16  # role and turn marks
PART_TOKENS = 4  # between the parts of one message: a newline, the marks of an image
TOOLS_TOKENS = 1024  # the instructions that come with tools or a schema (Anthropic documents up to 530)
TOOL_TOKENS = 64  # marks around one definition, call or result
# The dearest image of any provider we price: gpt-4o-mini at high detail, 2833 + 8 tiles of 5667 tokens
# (OpenAI, "Images and vision", calculating costs). Low detail is only some providers' word, and others go by the size:
# Qwen2-VL and its kin take up to 16,384 tokens (their max_pixels over 28 × 28), Claude up to 4,784, Gemini 1,120.
IMAGE_TOKENS = 2833 + 8 * 5667
LOW_DETAIL_IMAGE_TOKENS = 16_384
# The longest token of public vocabularies is 128 spaces (cl100k, o200k, Llama 3); twice that, for those unseen.
LONGEST_TOKEN_BYTES = 256
# What is probable; nothing is held by it.
LIKELY_IMAGE_TOKENS = 1_024  # of a screen in most models: gpt-4o 765, Claude 1,600, Gemini 1,032, Qwen 1,337
LIKELY_LOW_DETAIL_TOKENS = 85  # gpt-4o, and who follows it
USUAL_TOKEN_BYTES = 4  # of English text, in the common vocabularies

_PIECE = 1 << 20  # bytes looked at together when words are counted
# Every byte to "s" (white space) or "w" (part of a word).
_WORD_MAP = bytes(ord("s") if chr(byte) in " \t\n\r\v\f" else ord("w") for byte in range(256))


def prompt_tokens_most(request: InferenceRequest) -> int:
    """Return a number of tokens that the prompt never exceeds, with any byte-level tokenizer and chat template.

    Counts UTF-8 bytes of everything that reaches the prompt, the overheads stated in this module, images at the
    dearest provider's maximum; prompts given as token ids count exactly.
    """
    match request:
        case ChatRequest():
            return TEMPLATE_TOKENS + sum(map(_message_most, request.messages)) + _tools_most(request)
        case CompletionRequest():
            prompts = _prompts(request.prompt)
            suffix = byte_length(request.suffix) + TOOL_TOKENS if request.suffix else 0
            return sum(_prompt_most(prompt) for prompt in prompts) + suffix * len(prompts)
        case EmbeddingRequest():
            return sum(_prompt_most(prompt) for prompt in _prompts(request.input))


def prompt_tokens_likely(request: InferenceRequest) -> int:
    """Return about how many tokens the prompt has: its bytes by those of a usual token, an image as most models count a
    large one; prompts given as token ids count exactly."""
    match request:
        case ChatRequest():
            images = list(images_of(request))
            calls = (call for message in request.messages for call in message.tool_calls or ())
            size = sum(map(_message_most, request.messages)) - sum(map(image_tokens_most, images))
            size -= sum(_quoted_length(call.function.arguments) for call in calls)  # once is enough
            if request.tools:
                size += TOOLS_TOKENS + len(msgspec.json.encode(request.tools))
            if request.response_format is not None:
                size += len(msgspec.json.encode(request.response_format))
            return size // USUAL_TOKEN_BYTES + sum(map(_image_likely, images))
        case CompletionRequest():
            prompts, suffix = _prompts(request.prompt), byte_length(request.suffix or "")
            return sum(map(_prompt_likely, prompts)) + suffix // USUAL_TOKEN_BYTES * len(prompts)
        case EmbeddingRequest():
            return sum(map(_prompt_likely, _prompts(request.input)))


def prompt_tokens_least(request: InferenceRequest, enough: int | None = None) -> int:
    """Return a number of tokens that the longest single prompt of the request has at the least.

    Tokenizers of the field split at white space before anything else, so each word is a token or more; without
    spaces, each ``LONGEST_TOKEN_BYTES`` are. Prompts given as token ids count exactly. Counting may stop once it has
    found ``enough``.
    """
    match request:
        case ChatRequest():
            return _texts_least((text for message in request.messages for text in _texts(message)), enough)
        case CompletionRequest():
            return max((_prompt_least(prompt, enough) for prompt in _prompts(request.prompt)), default=0)
        case EmbeddingRequest():
            return max((_prompt_least(prompt, enough) for prompt in _prompts(request.input)), default=0)


def prompt_characters(request: InferenceRequest) -> int:
    """Return the length of everything written in the request in characters (or token ids), images left out."""
    match request:
        case ChatRequest():
            size = 0
            for message in request.messages:
                content = message.content
                size += len(content) if isinstance(content, str) else sum(map(len, _texts(message)))
            return size
        case CompletionRequest():
            return sum(len(prompt) for prompt in _prompts(request.prompt)) + len(request.suffix or "")
        case EmbeddingRequest():
            return sum(len(prompt) for prompt in _prompts(request.input))


def number_of_prompts(request: InferenceRequest) -> int:
    """Return how many prompts, or inputs, a request has."""
    match request:
        case ChatRequest():
            return 1
        case CompletionRequest():
            return len(_prompts(request.prompt))
        case EmbeddingRequest():
            return len(_prompts(request.input))


def byte_length(text: str) -> int:
    """Return the length of ``text`` in UTF-8 bytes."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _message_most(message: Message) -> int:
    tokens = MESSAGE_TOKENS
    # Templates write the results of tools as JSON strings, so their quotes and newlines take two bytes.
    size = _quoted_length if message.role == "tool" else byte_length
    if isinstance(message.content, str):
        tokens += size(message.content)
        content: tuple[ContentPart, ...] = ()
    else:
        content = message.content or ()
    for part in content:
        tokens += PART_TOKENS
        match part:
            case TextPart(text):
                tokens += size(text)
            case RefusalPart(refusal):
                tokens += byte_length(refusal)
            case ImagePart(image):
                tokens += image_tokens_most(image)
    for extra in (message.name, message.refusal, message.tool_call_id):
        tokens += byte_length(extra) if extra else 0
    for block in message.thinking_blocks or ():
        match block:
            case ThinkingBlock(thinking, signature):
                tokens += PART_TOKENS + byte_length(thinking) + byte_length(signature)
            case RedactedThinkingBlock(data):
                tokens += PART_TOKENS + byte_length(data)
    for call in message.tool_calls or ():
        # Arguments arrive as they are, quoted once more, or parsed and written with spaces: the sum covers each.
        tokens += TOOL_TOKENS + byte_length(call.id) + byte_length(call.function.name)
        tokens += byte_length(call.function.arguments) + _quoted_length(call.function.arguments)
    return tokens


def images_of(request: ChatRequest) -> Iterator[ImageUrl]:
    """Yield every image in a request."""
    for message in request.messages:
        if isinstance(message.content, tuple):
            for part in message.content:
                if isinstance(part, ImagePart):
                    yield part.image_url


def image_tokens_most(image: ImageUrl) -> int:
    """Return the tokens that no provider exceeds for an image."""
    return LOW_DETAIL_IMAGE_TOKENS if image.detail == "low" else IMAGE_TOKENS


def _image_likely(image: ImageUrl) -> int:
    return LIKELY_LOW_DETAIL_TOKENS if image.detail == "low" else LIKELY_IMAGE_TOKENS


def _tools_most(request: ChatRequest) -> int:
    tokens = TOOLS_TOKENS if request.tools else 0
    tokens += sum(TOOL_TOKENS + _json_most(tool) for tool in request.tools or ())
    if isinstance(request.response_format, JsonSchemaFormat):
        tokens += TOOLS_TOKENS + _json_most(request.response_format.json_schema)
    elif request.response_format is not None:
        tokens += MESSAGE_TOKENS
    return tokens


def _json_most(value: Tool | msgspec.Struct) -> int:
    # Llama's template writes tools as JSON indented by four, the longest form that we know of.
    return len(msgspec.json.format(msgspec.json.encode(value), indent=4))


def _quoted_length(text: str) -> int:
    return len(msgspec.json.encode(text))


def _prompts(given: Prompts) -> list[str | list[int]]:
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):
        return [cast(list[int], given)]
    return cast(list[str | list[int]], given)


def _prompt_most(prompt: str | list[int]) -> int:
    return byte_length(prompt) + MESSAGE_TOKENS if isinstance(prompt, str) else len(prompt)


def _prompt_likely(prompt: str | list[int]) -> int:
    return max(1, byte_length(prompt) // USUAL_TOKEN_BYTES) if isinstance(prompt, str) else len(prompt)


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
