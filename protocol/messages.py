# A message as Anthropic's Messages API asks for it. A request keeps this form beside that of a chat completion
# (messages_to_chat.py), for an upstream that speaks it.

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from protocol.chat import (
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_TOOLS,
    CacheControl,
    RedactedThinkingBlock,
    ThinkingBlock,
)

Effort = Literal["low", "medium", "high", "xhigh", "max"]


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


class CountRequest(MessagesRequest, frozen=True, omit_defaults=True, kw_only=True):
    """A request to count the tokens of a prompt; nothing is generated."""

    max_tokens: int = 1
