# A message as Anthropic's Messages API asks for it. A request keeps this form beside that of a chat completion
# (messages_to_chat.py), for an upstream that speaks it.

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import force_setattr, replace

from protocol.chat import MOST_MESSAGES, MOST_PARTS, MOST_TOOLS, RedactedThinkingBlock, ThinkingBlock

Effort = Literal["low", "medium", "high", "xhigh", "max"]
Display = Literal["summarized", "omitted", "updates"]  # of what the model thinks


class CacheControl(Struct, frozen=True, omit_defaults=True):
    """Marks the end of a prefix that shall be cached, for five minutes unless an hour is said."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Struct, frozen=True, tag="text", omit_defaults=True):
    text: str
    cache_control: CacheControl | None = None
    citations: tuple[dict[str, Any], ...] | None = None  # of an earlier answer


class Base64Source(Struct, frozen=True, tag="base64"):
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(Struct, frozen=True, tag="url"):
    url: str


class ImageBlock(Struct, frozen=True, tag="image", omit_defaults=True):
    source: Base64Source | UrlSource
    cache_control: CacheControl | None = None


class PdfSource(Struct, frozen=True, tag="base64"):
    media_type: Literal["application/pdf"]
    data: str


class PlainSource(Struct, frozen=True, tag="text"):
    media_type: Literal["text/plain"]
    data: str


class ContentSource(Struct, frozen=True, tag="content"):
    content: str | Annotated[tuple[TextBlock | ImageBlock, ...], Meta(max_length=MOST_PARTS)]


class CitationsConfig(Struct, frozen=True, omit_defaults=True):
    enabled: bool | None = None


class DocumentBlock(Struct, frozen=True, tag="document", omit_defaults=True):
    """A PDF, or a text, that answers may cite. Files of the upstream's account are no caller's, so none is named."""

    source: PdfSource | PlainSource | ContentSource | UrlSource
    title: str | None = None
    context: str | None = None
    citations: CitationsConfig | None = None
    cache_control: CacheControl | None = None


class SearchResultBlock(Struct, frozen=True, tag="search_result", omit_defaults=True):
    """What the caller's own search found."""

    source: str
    title: str
    content: Annotated[tuple[TextBlock, ...], Meta(max_length=MOST_PARTS)]
    citations: CitationsConfig | None = None
    cache_control: CacheControl | None = None


class ToolUseBlock(Struct, frozen=True, tag="tool_use", omit_defaults=True):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None  # who called: the model itself, where the upstream says so


class ServerToolUseBlock(Struct, frozen=True, tag="server_tool_use", omit_defaults=True):
    """A call of a tool that the upstream runs, in an answer or in an earlier one."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None


class WebSearchResultBlock(Struct, frozen=True, tag="web_search_tool_result", omit_defaults=True):
    """What the upstream's search found, which the model alone can read, or the code of an error."""

    tool_use_id: str
    content: Annotated[tuple[dict[str, Any], ...], Meta(max_length=MOST_PARTS)] | dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None

    @property
    def has_found(self) -> bool:
        """Whether a search was made, and is billed: an error is none."""
        return isinstance(self.content, tuple)


class ServerResultBlock(Struct, frozen=True, omit_defaults=True):
    """What another tool of the upstream's gave back, in its own words: a page, what code wrote, or an error."""

    tool_use_id: str
    content: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None


class WebFetchResultBlock(ServerResultBlock, frozen=True, tag="web_fetch_tool_result", omit_defaults=True):
    pass


class CodeResultBlock(ServerResultBlock, frozen=True, tag="bash_code_execution_tool_result", omit_defaults=True):
    pass


class EditorResultBlock(
    ServerResultBlock, frozen=True, tag="text_editor_code_execution_tool_result", omit_defaults=True
):
    pass


CodeResult = CodeResultBlock | EditorResultBlock  # a container was there for it
ServerBlock = ServerToolUseBlock | WebSearchResultBlock | WebFetchResultBlock | CodeResult
OWN_BLOCKS = SearchResultBlock | ServerBlock  # that no other API has
ResultBlock = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock


class ToolResultBlock(Struct, frozen=True, tag="tool_result", omit_defaults=True):
    tool_use_id: str
    content: str | Annotated[tuple[ResultBlock, ...], Meta(max_length=MOST_PARTS)] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = ResultBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock | ServerBlock


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
    "memory_20250818": "context-management-2025-06-27",
}
# Tools that the upstream runs: how each is called, and by what it is billed beside tokens (``HostedTool.unit``).
WEB_SEARCH, WEB_FETCH, CODE_EXECUTION = "web_search_20250305", "web_fetch_20250910", "code_execution_20250825"
RUN_UPSTREAM = {
    WEB_SEARCH: ("web_search", "web_searches"),
    WEB_FETCH: ("web_fetch", ""),
    CODE_EXECUTION: ("code_execution", "containers"),
}
# How many calls of one a request may ask for that does not say. After as many Anthropic's API pauses a turn anyway.
MOST_SEARCHES = 10
# What may be edited out of a long conversation before the model reads it, and the beta that a request for it has to
# name. Compaction is none of it: its own tokens are billed beside those that a reply's usage counts.
CONTEXT_EDITS = ("clear_tool_uses_20250919", "clear_thinking_20251015")
CONTEXT_BETA = "context-management-2025-06-27"
BUDGET_BETA = "task-budgets-2026-03-13"
UPDATES_BETA = "thinking-display-updates-2026-08-18"
# Betas of Anthropic's that callers may ask for: they change no price, and reach nothing that other teams have.
CALLERS_BETAS = frozenset(
    {
        *filter(None, CLIENT_TOOLS.values()),
        CONTEXT_BETA,
        BUDGET_BETA,
        UPDATES_BETA,
        "claude-code-20250219",
        "code-execution-2025-08-25",
        "effort-2025-11-24",
        "extended-cache-ttl-2025-04-11",
        "fine-grained-tool-streaming-2025-05-14",
        "interleaved-thinking-2025-05-14",
        "model-context-window-exceeded-2025-08-26",
        "pdfs-2024-09-25",
        "prompt-caching-2024-07-31",
        "search-results-2025-06-09",
        "structured-outputs-2025-11-13",
        "token-efficient-tools-2025-02-19",
        "tool-examples-2025-10-29",
        "web-fetch-2025-09-10",
    }
)
# What such a tool adds to a prompt is written by the upstream, up to 735 tokens (Anthropic, "Computer use tool"). This
# stands for it where a prompt is counted; no upstream is sent it.
UNSEEN_SCHEMA: dict[str, Any] = {"description": "-" * 735}


class MessageTool(Struct, frozen=True, omit_defaults=True):
    """A tool that the caller runs, its own or one of ``CLIENT_TOOLS``; or one of ``RUN_UPSTREAM``.

    Others that the upstream runs have a price that is not known here.
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
    input_examples: tuple[dict[str, Any], ...] | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: tuple[str, ...] | None = None
    max_uses: int | None = None  # of a search or of pages fetched, as the next two
    allowed_domains: tuple[str, ...] | None = None
    blocked_domains: tuple[str, ...] | None = None
    user_location: dict[str, Any] | None = None  # of a search
    max_content_tokens: int | None = None  # of a page that is fetched, as the next two
    citations: CitationsConfig | None = None
    url_sources: dict[str, Any] | None = None

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
    display: Display | None = None


class ThinkingAdaptive(Struct, frozen=True, tag="adaptive", omit_defaults=True):
    display: Display | None = None


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
    task_budget: dict[str, Any] | None = None  # what the model is told of the tokens that a whole task may take


class ContextEdit(Struct, frozen=True, omit_defaults=True):
    """One of ``CONTEXT_EDITS``, with its own fields as the caller has them."""

    type: str
    trigger: dict[str, Any] | None = None
    keep: dict[str, Any] | Literal["all"] | None = None
    clear_at_least: dict[str, Any] | None = None
    clear_tool_inputs: bool | tuple[str, ...] | None = None
    exclude_tools: tuple[str, ...] | None = None


class ContextManagement(Struct, frozen=True):
    edits: Annotated[tuple[ContextEdit, ...], Meta(max_length=len(CONTEXT_EDITS))] = ()


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
    output_format: OutputFormat | None = None  # what betas called output_config.format, which it is read as
    metadata: MessageMetadata | None = None
    cache_control: CacheControl | None = None  # of the last block that can be cached, wherever that is
    context_management: ContextManagement | None = None
    anthropic_beta: tuple[str, ...] | None = None  # as a header, or in the body as clouds have it

    def __post_init__(self) -> None:
        if self.output_format is not None:
            config = self.output_config or OutputConfig()
            force_setattr(self, "output_config", replace(config, format=config.format or self.output_format))
            force_setattr(self, "output_format", None)

    @property
    def betas(self) -> frozenset[str]:
        """The betas that Anthropic wants named with this request, and those of the caller's that are let through."""
        betas = {beta for tool in self.tools or () if (beta := CLIENT_TOOLS.get(tool.type or "")) is not None}
        if self.context_management is not None:
            betas.add(CONTEXT_BETA)
        if self.output_config is not None and self.output_config.task_budget is not None:
            betas.add(BUDGET_BETA)
        if getattr(self.thinking, "display", None) == "updates":
            betas.add(UPDATES_BETA)
        return CALLERS_BETAS.intersection(self.anthropic_beta or ()) | betas

    @property
    def has_cache_marks(self) -> bool:
        """Whether the caller marked a prefix that shall be cached."""
        return next(self.cache_marks(), None) is not None

    @property
    def is_kept_an_hour(self) -> bool:
        """Whether it is a cache of an hour."""
        return any(mark.ttl == "1h" for mark in self.cache_marks())

    def cache_marks(self) -> Iterator[CacheControl]:
        """Yield every mark of a prefix that shall be cached."""
        if self.cache_control is not None:
            yield self.cache_control
        for marked in chain(self.tools or (), self.blocks()):
            if (mark := getattr(marked, "cache_control", None)) is not None:
                yield mark

    def blocks(self) -> Iterator[Block]:
        """Yield every block, also those inside of others."""
        for content in (self.system, *(turn.content for turn in self.messages)):
            yield from _blocks_in(content)

    @property
    def run_upstream(self) -> frozenset[str]:
        """The types of the tools that the upstream may run for it."""
        return frozenset(tool.type for tool in self.tools or () if tool.type in RUN_UPSTREAM)

    @property
    def kind_of_its_own(self) -> str | None:
        """The type of a tool or of a block that no other API has: the chat that this request is shows it to be counted,
        and cannot be asked of another model."""
        tools = (tool.type for tool in self.tools or () if tool.is_anthropics)
        blocks = (block for block in self.blocks() if isinstance(block, OWN_BLOCKS) or _is_to_be_cited(block))
        return next(chain(tools, (str(block.__struct_config__.tag) for block in blocks)), None)

    def beside_chat(self) -> list[Any]:
        """Return what the request says in words of its callers and a chat has no place for."""
        of_blocks = [getattr(block, name, None) for block in self.blocks() for name in ("citations", "caller")]
        of_tools = [tool.allowed_callers for tool in self.tools or ()]
        budget = self.output_config.task_budget if self.output_config else None
        found = (self.context_management, self.anthropic_beta, budget, *of_tools, *of_blocks)
        return [said for said in found if said is not None]

    def anthropics_wishes(self) -> Iterator[str]:
        """Yield the names of its fields that no other API has, and that change no meaning of it."""
        if self.has_cache_marks:
            yield "cache_control"
        if self.context_management is not None:
            yield "context_management"
        if self.output_config is not None and self.output_config.task_budget is not None:
            yield "output_config.task_budget"
        for name in ("eager_input_streaming", "defer_loading", "allowed_callers"):
            if any(getattr(tool, name) for tool in self.tools or ()):
                yield f"tools.{name}"
        if any(isinstance(block, TextBlock) and block.citations for block in self.blocks()):
            yield "citations"


def _is_to_be_cited(block: Block) -> bool:
    return isinstance(block, DocumentBlock) and block.citations is not None and bool(block.citations.enabled)


def _blocks_in(content: str | tuple[Block, ...] | None) -> Iterator[Block]:
    for block in content if isinstance(content, tuple) else ():
        yield block
        match block:
            case ToolResultBlock(content=inner) | SearchResultBlock(content=inner):
                yield from _blocks_in(inner)
            case DocumentBlock(source=ContentSource(inner)):
                yield from _blocks_in(inner)


class CountRequest(MessagesRequest, frozen=True, omit_defaults=True, kw_only=True):
    """A request to count the tokens of a prompt; nothing is generated."""

    max_tokens: int = 1
