# How many tokens a prompt has at the very most, and probably. The holds rest on the upper bound, so they are never too
# small.
#
# The upper bound has two ways to look at what is written. Its bytes cost next to nothing to count, and no byte-level
# tokenizer makes more tokens; a short prompt is held so, because its answer outweighs it. A closer look costs some ten
# nanoseconds a byte and tells a quarter to a half of that: long prompts are held so, and any prompt that is refused.

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from protocol.chat import (
    AudioData,
    AudioPart,
    ChatRequest,
    FilePart,
    ImagePart,
    ImageUrl,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    PdfFile,
    RedactedThinkingBlock,
    RefusalPart,
    TextPart,
    ThinkingBlock,
    Tool,
)
from protocol.completions import CompletionRequest
from protocol.embeddings import EmbeddingRequest, RerankRequest
from protocol.inference import Request
from protocol.media.audio import RealtimeRequest, SpeechRequest, TranscriptionRequest
from protocol.media.images import ImageEditRequest, ImageRequest, PictureFile
from router.catalog.targets import ModelSpec
from router.prompt_size.pdf_pages import MOST_PAGES
from router.prompt_size.pictures import Picture, images_of, picture_of, picture_tokens_most
from router.prompt_size.prompt_lengths import byte_length, prompts_of
from router.prompt_size.text_bounds import bytes_most
from router.prompt_size.token_counts import tokens_most

# A byte-level tokenizer makes at most one token of each UTF-8 byte. What a chat template adds to that, in tokens:
TEMPLATE_TOKENS = 128  # begin and end marks, generation prompt, a default system message
MESSAGE_TOKENS = 16  # role and turn marks
PART_TOKENS = 4  # between the parts of one message: a newline, the marks of an image
TOOLS_TOKENS = 1024  # the instructions that come with tools or a schema (Anthropic documents up to 530)
TOOL_TOKENS = 64  # marks around one definition, call or result
SHORT = 4_096  # bytes of a prompt that are held as they are,
LONG = 2 * 1024 * 1024  # and of one that fills most contexts anyway: it is not worth the tenth of a second
MOST_SIZED = 2_000  # pictures of a prompt whose size is looked for: no maker takes more
# What is probable; nothing is held by it.
LIKELY_IMAGE_TOKENS = 1_024  # of a screen in most models: gpt-4o 765, Claude 1,600, Gemini 1,032, Qwen 1,337
LIKELY_PAGE_TOKENS = 3_000  # of a PDF, its picture and its text,
LIKELY_PAGES = 10  # where it does not say how many it has
LIKELY_LOW_DETAIL_TOKENS = 85  # gpt-4o, and who follows it
USUAL_TOKEN_BYTES = 4  # of English text, in the common vocabularies

PLAIN_DEFINITIONS = 512 * 1024  # bytes of tools or of a schema that are written out in any case
# Tokens of a second of a recording: 10 at OpenAI, 12.5 of Voxtral; in a chat at Gemini 32 (Google, "Audio
# understanding").
MOST_AUDIO_TOKENS = 16
MOST_CHAT_AUDIO_TOKENS = 32
USUAL_AUDIO_TOKENS = 10
USUAL_ANSWER_SECONDS = 20  # of an earlier answer by voice; nothing is held by it
MOST_INDENTED = 4  # times their length when they are indented, beyond which they are not

# Of compact JSON, its strings passed over.
_SIGNS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\Z)|[\[\]{},:]')


class PromptBound(Struct, frozen=True, dict=True):
    """What a prompt comes to at the most, on any model: its pictures by the model's formula, its text by bytes or by a
    closer look (``is_close``)."""

    added: int  # tokens that templates add, and prompts given as token ids
    texts: Sequence[str]
    images: Sequence[ImageUrl | PdfFile | PictureFile] = ()
    recordings: Sequence[AudioData] = ()
    answers: int = 0  # earlier ones by voice
    is_close: bool = False

    @cached_property
    def size(self) -> int:
        """Tokens without the pictures, if every byte were one."""
        return self.added + sum(map(bytes_most, self.texts))

    @property
    def is_short(self) -> bool:
        """Whether a closer look is not worth its time."""
        return self.size <= SHORT

    def closely(self) -> PromptBound:
        """Return the same prompt, looked at closely."""
        return replace(self, is_close=True)

    def tokens_on(self, model: ModelSpec) -> int:
        """Return a number of tokens that the prompt never exceeds on ``model``."""
        text = self._counted(model.tokenizer) if self.is_close and self.size <= LONG else self.size
        if not (self.images or self.is_heard):
            return text
        return text + self.seen_on(model) + self.heard_on(model)

    def seen_on(self, model: ModelSpec) -> int:
        """Return the most tokens of the pictures on ``model``."""
        return sum(picture_tokens_most(model.upstream_model, picture) for picture in self.pictures)

    @property
    def is_heard(self) -> bool:
        """Whether any of it is."""
        return bool(self.recordings or self.answers)

    def heard_on(self, model: ModelSpec) -> int:
        """Return the most tokens that ``model`` hears: of an earlier answer by voice no more than it can have said."""
        return self.heard[0] + self.answers * model.max_output

    def _counted(self, tokenizer: str | None) -> int:
        """Return the tokens without the pictures, by a tokenizer or a bound for all; each is asked once."""
        if tokenizer not in self._counts:
            # Joined, because a look at each of thousands of words would cost more; templates put marks between them.
            self._counts[tokenizer] = min(self.size, self.added + tokens_most("\n".join(self.texts), tokenizer))
        return self._counts[tokenizer]

    @cached_property
    def pictures(self) -> tuple[Picture, ...]:
        """The images, as large as the first of them say they are."""
        unsized = (
            Picture(None, getattr(image, "detail", None) == "low", MOST_PAGES if isinstance(image, PdfFile) else 0)
            for image in self.images[MOST_SIZED:]
        )
        return (*map(picture_of, self.images[:MOST_SIZED]), *unsized)

    @cached_property
    def heard(self) -> tuple[int, int]:
        """The most tokens of the recordings on any model, and about how many they and earlier answers are."""
        seconds = [recording.seconds for recording in self.recordings]
        most, likely = (sum(each) for each in zip(*seconds, strict=True)) if seconds else (0, 0)
        likely += self.answers * USUAL_ANSWER_SECONDS
        return most * MOST_CHAT_AUDIO_TOKENS, likely * USUAL_AUDIO_TOKENS

    @cached_property
    def _counts(self) -> dict[str | None, int]:
        return {}


def bound_prompt(request: Request) -> PromptBound:
    """Return the upper bound of a request's prompt, by its bytes.

    Counts everything that reaches the prompt and the overheads stated in this module; prompts given as token ids count
    exactly.
    """
    match request:
        case ChatRequest():
            return _chat_bound(request)
        case CompletionRequest():
            prompts = prompts_of(request.prompt)
            suffix = request.suffix or ""
            return _plain_bound(prompts, suffix, TOOL_TOKENS * len(prompts) if suffix else 0)
        case EmbeddingRequest():
            return _plain_bound(prompts_of(request.input))
        case RerankRequest():
            texts = list[str | list[int]](request.texts)
            query = bytes_most(request.query) + MESSAGE_TOKENS
            return _plain_bound(texts, added=query * len(texts))
        case ImageEditRequest(files=files):
            return PromptBound(TEMPLATE_TOKENS + PART_TOKENS * len(files), [request.prompt], files)
        case ImageRequest():
            return _plain_bound([request.prompt])
        case SpeechRequest():
            return _plain_bound([request.input], request.instructions or "")
        case TranscriptionRequest():
            return _plain_bound([request.prompt or ""], added=request.file.seconds_most * MOST_AUDIO_TOKENS)
        case RealtimeRequest():
            return _plain_bound([])


def prompt_tokens_likely(request: Request) -> int:
    """Return about how many tokens the prompt has: its bytes by those of a usual token, an image as most models count a
    large one; prompts given as token ids count exactly."""
    match request:
        case ChatRequest():
            images = list(images_of(request))
            calls = (call for message in request.messages for call in message.tool_calls or ())
            bound = _chat_bound(replace(request, tools=None, response_format=None))
            size = bound.size - TEMPLATE_TOKENS
            size -= sum(len(msgspec.json.encode(call.function.arguments)) for call in calls)  # once is enough
            if request.tools:
                size += TOOLS_TOKENS + len(msgspec.json.encode(request.tools))
            if request.response_format is not None:
                size += len(msgspec.json.encode(request.response_format))
            return size // USUAL_TOKEN_BYTES + sum(map(_image_likely, images)) + bound.heard[1]
        case CompletionRequest():
            prompts, suffix = prompts_of(request.prompt), byte_length(request.suffix or "")
            return sum(map(_prompt_likely, prompts)) + suffix // USUAL_TOKEN_BYTES * len(prompts)
        case EmbeddingRequest():
            return sum(map(_prompt_likely, prompts_of(request.input)))
        case RerankRequest():
            query = _prompt_likely(request.query) * len(request.documents)
            return query + sum(map(_prompt_likely, request.texts))
        case ImageRequest():
            return _prompt_likely(request.prompt) + shown_tokens(request)
        case SpeechRequest():
            return _prompt_likely(request.input) + _prompt_likely(request.instructions or "")
        case TranscriptionRequest():
            return _prompt_likely(request.prompt or "") + request.file.seconds_likely * USUAL_AUDIO_TOKENS
        case RealtimeRequest():
            return 0


def shown_tokens(request: Request) -> int:
    """Return about how many tokens the pictures of a request to edit some have."""
    return LIKELY_IMAGE_TOKENS * len(request.files) if isinstance(request, ImageEditRequest) else 0


def _chat_bound(request: ChatRequest) -> PromptBound:
    added = TEMPLATE_TOKENS + MESSAGE_TOKENS * len(request.messages)
    texts: list[str] = []
    images: list[ImageUrl | PdfFile] = []
    recordings: list[AudioData] = []
    answers = 0
    for message in request.messages:
        if type(message.content) is str:
            texts.append(_quoted(message.content) if message.role == "tool" else message.content)
        elif message.content:
            added += PART_TOKENS * len(message.content)
            _read_parts(message, texts, images, recordings)
        if message.name or message.refusal or message.tool_call_id:
            texts += filter(None, (message.name, message.refusal, message.tool_call_id))
        if message.thinking_blocks or message.tool_calls:
            added += _read_turn(message, texts)
        answers += message.audio is not None
    if request.tools:
        added += TOOLS_TOKENS + TOOL_TOKENS * len(request.tools) + _add_indented(request.tools, texts)
    if isinstance(request.response_format, JsonSchemaFormat):
        added += TOOLS_TOKENS + _add_indented((request.response_format.json_schema,), texts)
    elif isinstance(request.response_format, JsonObjectFormat):
        added += TOOLS_TOKENS  # Claude is asked for it by a tool
    elif request.response_format is not None:
        added += MESSAGE_TOKENS
    return PromptBound(added, texts, images, recordings, answers)


def _plain_bound(prompts: list[str | list[int]], suffix: str = "", added: int = 0) -> PromptBound:
    texts = [
        text for prompt in prompts if isinstance(prompt, str) for text in ((prompt, suffix) if suffix else (prompt,))
    ]
    for prompt in prompts:
        added += MESSAGE_TOKENS if isinstance(prompt, str) else len(prompt)
    return PromptBound(added, texts)


def _read_parts(
    message: Message, texts: list[str], images: list[ImageUrl | PdfFile], recordings: list[AudioData]
) -> None:
    for part in message.content or ():
        match part:
            case TextPart(text):
                # Templates write the results of tools as JSON strings, so their quotes and newlines take two bytes.
                texts.append(_quoted(text) if message.role == "tool" else text)
            case RefusalPart(refusal):
                texts.append(refusal)
            case ImagePart(image):
                images.append(image)
            case FilePart(file):
                images.append(file)
                texts.append(file.filename or "")
            case AudioPart(recording):
                recordings.append(recording)


def _read_turn(message: Message, texts: list[str]) -> int:
    """Add what an assistant thought and called to ``texts``; return the tokens that a template adds to it."""
    added = 0
    for block in message.thinking_blocks or ():
        added += PART_TOKENS
        match block:
            case ThinkingBlock(thinking, signature):
                texts += (thinking, signature)
            case RedactedThinkingBlock(data):
                texts.append(data)
    for call in message.tool_calls or ():
        added += TOOL_TOKENS
        # Arguments arrive as they are, quoted once more, or parsed and written with spaces: the sum covers each.
        texts += (call.id, call.function.name, call.function.arguments, _quoted(call.function.arguments))
    return added


def _image_likely(image: ImageUrl | PdfFile) -> int:
    if isinstance(image, PdfFile):
        return LIKELY_PAGE_TOKENS * min(LIKELY_PAGES, picture_of(image).pages)
    return LIKELY_LOW_DETAIL_TOKENS if image.detail == "low" else LIKELY_IMAGE_TOKENS


def _add_indented(values: Sequence[Tool | JsonSchema], texts: list[str]) -> int:
    """Add definitions to the texts; return tokens that their form adds to that. What is nested so deep that its blanks
    would be many times the rest is not written out."""
    data = msgspec.json.encode(values)
    if len(data) > PLAIN_DEFINITIONS and (length := indented_length(data)) > MOST_INDENTED * len(data):
        texts.append(data.decode())
        return length - len(data)
    texts += map(_indented, values)
    return 0


def indented_length(data: bytes) -> int:
    """Return the length of compact JSON when it is indented by four."""
    size, depth = len(data), 0
    for sign in _SIGNS.finditer(data):
        match sign[0]:
            case b"[" | b"{":
                depth += 1
                size += 1 + 4 * depth
            case b"]" | b"}":
                depth -= 1
                is_empty = data[sign.start() - 1 : sign.start()] in (b"[", b"{")
                size += -(5 + 4 * depth) if is_empty else 1 + 4 * depth
            case b",":
                size += 1 + 4 * depth
            case b":":
                size += 1
    return size


def _indented(value: Tool | JsonSchema) -> str:
    # Llama's template writes tools as JSON indented by four, the longest form that we know of.
    return msgspec.json.format(msgspec.json.encode(value), indent=4).decode()


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _prompt_likely(prompt: str | list[int]) -> int:
    return max(1, byte_length(prompt) // USUAL_TOKEN_BYTES) if isinstance(prompt, str) else len(prompt)
