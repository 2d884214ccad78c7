# A message as Anthropic's Messages API has it: what is asked, and the same as a chat completion, which is what the rest
# of the gateway understands. A request keeps its own form too, for an upstream that speaks it.

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from protocol.chat import (
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_TOOLS,
    CacheControl,
    ChatRequest,
    ContentPart,
    Function,
    FunctionCall,
    ImagePart,
    ImageUrl,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    NamedFunction,
    NamedTool,
    RedactedThinkingBlock,
    TextPart,
    ThinkingBlock,
    Tool,
    ToolCall,
)
from protocol.errors import BadRequest

Effort = Literal["low", "medium", "high", "xhigh", "max"]
AS_REASONING: dict[Effort, Literal["low", "medium", "high", "xhigh"]] = {
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "xhigh",
    "max": "xhigh",
}


class TextBlock(Struct, frozen=True, tag="text", omit_defaults=True):
    text: str
    cache_control: CacheControl | None = None


class Base64Source(Struct, frozen=True, tag="base64"):
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(Struct, frozen=True, tag="url"):
    url: str


class ImageBlock(Struct, frozen=True, tag="image", omit_defaults=True):
    source: Base64Source | UrlSource
    cache_control: CacheControl | None = None


class ToolUseBlock(Struct, frozen=True, tag="tool_use", omit_defaults=True):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(Struct, frozen=True, tag="tool_result", omit_defaults=True):
    tool_use_id: str
    content: str | Annotated[tuple[TextBlock | ImageBlock, ...], Meta(max_length=MOST_PARTS)] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


class Turn(Struct, frozen=True):
    role: Literal["user", "assistant", "system"]  # system: instructions on the way, text alone
    content: str | Annotated[tuple[Block, ...], Meta(max_length=MOST_PARTS)]


# Tools that Claude was trained on and the caller runs, with the beta that a request with them has to name.
CLIENT_TOOLS: dict[str, str | None] = {
    "bash_20241022": "computer-use-2024-10-22",
    "bash_20250124": None,
    "text_editor_20241022": "computer-use-2024-10-22",
    "text_editor_20250124": None,
    "text_editor_20250429": None,
    "text_editor_20250728": None,
    "computer_20241022": "computer-use-2024-10-22",
    "computer_20250124": "computer-use-2025-01-24",
    "computer_20251124": "computer-use-2025-11-24",
}
# What such a tool adds to a prompt is written by the upstream, up to 735 tokens (Anthropic, "Computer use tool"). This
# stands for it where a prompt is counted; no upstream is sent it.
UNSEEN_SCHEMA: dict[str, Any] = {"description": "-" * 735}


class MessageTool(Struct, frozen=True, omit_defaults=True):
    """A tool that the caller runs: one of its own, or one of ``CLIENT_TOOLS``.

    Those that the upstream runs have a price of their own, which is not known here.
    """

    name: str
    input_schema: dict[str, Any] | None = None  # of a caller's own tool
    description: str | None = None
    strict: bool | None = None
    type: str | None = None  # "custom" where none is said
    cache_control: CacheControl | None = None
    max_characters: int | None = None  # of a text editor
    display_width_px: int | None = None  # of a computer, as the next three
    display_height_px: int | None = None
    display_number: int | None = None
    enable_zoom: bool | None = None

    @property
    def is_anthropics(self) -> bool:
        """Whether the model knows the tool by its type."""
        return self.type not in (None, "custom")


class AutoChoice(Struct, frozen=True, tag="auto", omit_defaults=True):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Struct, frozen=True, tag="any", omit_defaults=True):
    disable_parallel_tool_use: bool | None = None


class ToolChoice(Struct, frozen=True, tag="tool", omit_defaults=True):
    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(Struct, frozen=True, tag="none"):
    pass


class ThinkingEnabled(Struct, frozen=True, tag="enabled", omit_defaults=True):
    budget_tokens: int
    display: Literal["summarized", "omitted"] | None = None


class ThinkingAdaptive(Struct, frozen=True, tag="adaptive", omit_defaults=True):
    display: Literal["summarized", "omitted"] | None = None


class ThinkingBetweenTools(Struct, frozen=True, tag="between_tools"):
    pass


class ThinkingDisabled(Struct, frozen=True, tag="disabled"):
    pass


class OutputFormat(Struct, frozen=True):
    schema: dict[str, Any]
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(Struct, frozen=True, omit_defaults=True):
    effort: Effort | None = None
    format: OutputFormat | None = None


class MessageMetadata(Struct, frozen=True, omit_defaults=True):
    user_id: str | None = None


class MessagesRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A request for a message. ``None`` means that the caller did not say."""

    model: str
    max_tokens: int
    messages: Annotated[tuple[Turn, ...], Meta(max_length=MOST_MESSAGES)]
    system: str | Annotated[tuple[TextBlock, ...], Meta(max_length=MOST_PARTS)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: tuple[str, ...] | None = None
    tools: Annotated[tuple[MessageTool, ...], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoChoice | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingBetweenTools | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    metadata: MessageMetadata | None = None
    cache_control: CacheControl | None = None  # of the last block that can be cached, wherever that is

    @property
    def betas(self) -> frozenset[str]:
        """The betas that Anthropic wants named with these tools."""
        return frozenset(beta for tool in self.tools or () if (beta := CLIENT_TOOLS.get(tool.type or "")) is not None)

    @property
    def has_cache_marks(self) -> bool:
        """Whether the caller marked a prefix that shall be cached."""
        lists = [self.system, self.tools, *(turn.content for turn in self.messages)]
        blocks = (block for some in lists if isinstance(some, tuple) for block in some)
        return self.cache_control is not None or any(getattr(block, "cache_control", None) for block in blocks)

    def as_chat(self) -> ChatRequest:
        """Return the same request as a chat completion. Raises BadRequest for turns that no dialect could carry."""
        config = self.output_config or OutputConfig()
        form = config.format
        return ChatRequest(
            model=self.model,
            messages=(*_instructions(self.system), *_messages(self.messages)),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stop=self.stop_sequences or None,
            stream=self.stream,
            tools=tuple(map(_tool, self.tools)) if self.tools else None,
            tool_choice=_choice(self.tool_choice) if self.tools else None,
            parallel_tool_calls=False if getattr(self.tool_choice, "disable_parallel_tool_use", None) else None,
            response_format=JsonSchemaFormat(JsonSchema("answer", form.schema, strict=True)) if form else None,
            reasoning_effort=_effort(self),
            user=self.metadata.user_id if self.metadata else None,
        )


class CountRequest(MessagesRequest, frozen=True, omit_defaults=True, kw_only=True):
    """A request to count the tokens of a prompt; nothing is generated."""

    max_tokens: int = 1


def _instructions(system: str | tuple[TextBlock, ...] | None) -> tuple[Message, ...]:
    words = system if isinstance(system, str) or system is None else _told(system, "system")
    return (Message("system", words),) if words else ()


def _messages(turns: tuple[Turn, ...]) -> list[Message]:
    messages: list[Message] = []
    for place, turn in enumerate(turns):
        blocks: tuple[Block, ...] = (TextBlock(turn.content),) if isinstance(turn.content, str) else turn.content
        if turn.role == "assistant":
            messages.append(_reply(blocks, f"messages[{place}]"))
        elif turn.role == "system":
            messages.append(Message("system", _told(blocks, f"messages[{place}]")))
        else:
            messages += _said(blocks, f"messages[{place}]")
    return messages


def _reply(blocks: tuple[Block, ...], where: str) -> Message:
    """Return an assistant's turn: one message with its words and its calls."""
    words, calls, thought = [], [], []
    for block in blocks:
        match block:
            case TextBlock(text):
                words.append(text)
            case ToolUseBlock(ident, name, arguments):
                calls.append(ToolCall(ident, FunctionCall(name, msgspec.json.encode(arguments).decode())))
            case ThinkingBlock() | RedactedThinkingBlock():
                thought.append(block)
            case _:
                raise _misplaced(block, where)
    text = "".join(words)
    return Message(
        "assistant",
        text if text or not calls else None,
        tool_calls=tuple(calls) or None,
        thinking_blocks=tuple(thought) or None,
    )


def _told(blocks: tuple[Block, ...], where: str) -> str:
    """Return the words of instructions that stand among the turns."""
    strange = next((block for block in blocks if not isinstance(block, TextBlock)), None)
    if strange is not None:
        raise _misplaced(strange, where)
    return "\n\n".join(block.text for block in blocks if isinstance(block, TextBlock))


def _said(blocks: tuple[Block, ...], where: str) -> list[Message]:
    """Return a user's turn: first a message for each result of a tool, then one with everything else."""
    results: list[Message] = []
    parts: list[ContentPart] = []
    for block in blocks:
        match block:
            case TextBlock(text):
                parts.append(TextPart(text))
            case ImageBlock(source):
                parts.append(_image(source))
            case ToolResultBlock(ident, content):
                inner = (TextBlock(content),) if isinstance(content, str) else content or ()
                words = "".join(each.text for each in inner if isinstance(each, TextBlock))
                results.append(Message("tool", f"Error: {words}" if block.is_error else words, tool_call_id=ident))
                parts += [_image(each.source) for each in inner if isinstance(each, ImageBlock)]
            case _:
                raise _misplaced(block, where)
    if len(parts) == 1 and isinstance(parts[0], TextPart):
        return [*results, Message("user", parts[0].text)]
    return [*results, Message("user", tuple(parts))] if parts or not results else results


def _image(source: Base64Source | UrlSource) -> ImagePart:
    if isinstance(source, UrlSource):
        return ImagePart(ImageUrl(source.url))
    return ImagePart(ImageUrl(f"data:{source.media_type};base64,{source.data}"))


def _misplaced(block: Block, where: str) -> BadRequest:
    kind = type(block).__struct_config__.tag
    return BadRequest(f"A block of type '{kind}' has no place in a turn of that role.", param=where)


def _tool(tool: MessageTool) -> Tool:
    schema = UNSEEN_SCHEMA if tool.is_anthropics else tool.input_schema
    return Tool(Function(tool.name, tool.description, schema, tool.strict))


def _choice(
    choice: AutoChoice | AnyChoice | ToolChoice | NoChoice | None,
) -> Literal["none", "auto", "required"] | NamedTool | None:
    match choice:
        case AnyChoice():
            return "required"
        case NoChoice():
            return "none"
        case ToolChoice(name):
            return NamedTool(NamedFunction(name))
        case AutoChoice():
            return "auto"
    return None


def _effort(request: MessagesRequest) -> Literal["none", "low", "medium", "high", "xhigh"] | None:
    effort = request.output_config.effort if request.output_config else None
    match request.thinking:
        case ThinkingDisabled():
            return "none"
        case ThinkingEnabled(budget):  # about as the providers' own tables have it
            return "low" if budget <= 2048 else "medium" if budget <= 8192 else "high"
        case _:
            return AS_REASONING[effort] if effort else None
