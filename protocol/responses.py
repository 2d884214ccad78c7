# A response as OpenAI's Responses API asks for it. A request keeps this form beside that of a chat completion
# (protocol/responses_to_chat.py), so that its answer can repeat what was asked.

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from protocol.chat import MOST_MESSAGES, MOST_PARTS, MOST_TOOLS, AudioData, JsonObjectFormat, TextFormat
from protocol.errors import Unshown

ItemStatus = Literal[
    "in_progress", "completed", "incomplete", "searching", "interpreting", "generating", "calling", "failed"
]


CacheMark = dict[str, Any] | None  # that the prompt is to be cached up to here: told to an upstream of this API alone


class InputText(Struct, frozen=True, tag="input_text", omit_defaults=True):
    text: str
    prompt_cache_breakpoint: CacheMark = None


class InputImage(Struct, frozen=True, tag="input_image", omit_defaults=True):
    image_url: str | None = None
    file_id: str | None = None  # no files are kept for responses: refused by name
    detail: Literal["auto", "low", "high"] | None = None
    prompt_cache_breakpoint: CacheMark = None


class InputFile(Struct, frozen=True, tag="input_file", omit_defaults=True):
    """A PDF, in its data URL or where it lies."""

    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None
    file_id: str | None = None  # refused by name, as of images
    detail: Literal["auto", "low", "high"] | None = None
    prompt_cache_breakpoint: CacheMark = None


class InputAudio(Struct, frozen=True, tag="input_audio"):
    input_audio: AudioData


class OutputText(Struct, frozen=True, tag="output_text", omit_defaults=True):
    """What a model said before, sent back. Its annotations are told to an upstream of this API alone, its scores to
    none."""

    text: str
    annotations: tuple[Any, ...] = ()


class OutputRefusal(Struct, frozen=True, tag="refusal"):
    refusal: str


class ReasoningText(Struct, frozen=True, tag="reasoning_text"):
    text: str


class SummaryText(Struct, frozen=True, tag="summary_text"):
    text: str


ItemPart = InputText | InputImage | InputFile | InputAudio | OutputText | OutputRefusal | ReasoningText
ItemContent = str | Annotated[tuple[ItemPart, ...], Meta(max_length=MOST_PARTS)] | None


class InputItem(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One item of a conversation. Which fields it needs is a matter of its type; a message may leave its type out."""

    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
        "item_reference",
        "compaction",
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
        "mcp_list_tools",
        "mcp_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "tool_search_call",
        "tool_search_output",
        "additional_tools",
    ] = "message"
    id: str | None = None
    status: ItemStatus | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None  # of a message
    content: ItemContent = None  # of a message, and of reasoning
    call_id: str | None = None  # of a call and of its output
    name: str | None = None  # of a call, as are the next three
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None  # of a function, a JSON text; of a search of tools, an object
    input: str | None = None  # of a custom tool
    output: ItemContent = None  # of a call's output
    summary: Annotated[tuple[SummaryText, ...], Meta(max_length=MOST_PARTS)] | None = None  # of reasoning
    encrypted_content: str | None = None  # of reasoning, and of a compaction
    phase: str | None = None  # of a model's message: whether more comes
    execution: str | None = None  # of a search of tools
    tools: Annotated[tuple[ResponsesTool, ...], Meta(max_length=MOST_TOOLS)] | None = None  # found, or of a server
    action: dict[str, Any] | str | None = None  # of a search of the web; of a picture, whether it is a new one
    queries: tuple[str, ...] | None = None  # of a search in files, as is the next
    results: tuple[dict[str, Any], ...] | None = None
    code: str | None = None  # that ran at the upstream, as have the next two
    container_id: str | None = None
    outputs: tuple[dict[str, Any], ...] | None = None
    result: str | None = None  # a picture in base64
    server_label: str | None = None  # of an MCP server, as are the next four
    approval_request_id: str | None = None
    approve: bool | None = None
    reason: str | None = None
    error: Any = None


class GrammarFormat(Struct, frozen=True, tag="grammar"):
    """What the input of a custom tool must look like. Models here are told it in words."""

    syntax: Literal["lark", "regex"]
    definition: str


class ResponsesTool(Unshown, Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What the caller runs: a function, a custom tool, whose input is a text, or a namespace of both; or one of
    ``HOSTED``, which the upstream runs. Tools of other types are told apart to be refused with words that help."""

    type: str = ""  # of none that an MCP server has
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    format: TextFormat | GrammarFormat | None = None  # of a custom tool
    tools: Annotated[tuple[ResponsesTool, ...], Meta(max_length=MOST_TOOLS)] | None = None  # of a namespace
    filters: dict[str, Any] | None = None  # of a search, of the web or in files; of the web the next four
    user_location: dict[str, Any] | None = None
    search_context_size: Literal["low", "medium", "high"] | None = None
    search_content_types: tuple[str, ...] | None = None
    external_web_access: bool | None = None
    execution: str | None = None  # of a search of tools: who makes it
    vector_store_ids: tuple[str, ...] | None = None  # of a search in files, as are the next two
    max_num_results: int | None = None
    ranking_options: dict[str, Any] | None = None
    container: str | dict[str, Any] | None = None  # of a code interpreter
    model: str | None = None  # of pictures, as are the next ten
    quality: str | None = None
    size: str | None = None
    background: str | None = None
    output_format: str | None = None
    output_compression: int | None = None
    moderation: str | None = None
    input_fidelity: str | None = None
    input_image_mask: dict[str, Any] | None = None
    partial_images: int | None = None
    action: str | None = None
    server_label: str | None = None  # of an MCP server, as are the next seven
    server_url: str | None = None
    connector_id: str | None = None
    server_description: str | None = None
    authorization: str | None = None  # a secret of the caller's, which no answer repeats, as are
    headers: dict[str, str] | None = None
    allowed_tools: tuple[str, ...] | dict[str, Any] | None = None
    require_approval: str | dict[str, Any] | None = None
    input_schema: Any = None  # of a tool that such a server has, as is the next
    annotations: Any = None

    @property
    def is_hosted(self) -> bool:
        """Whether the upstream runs it."""
        return self.type in HOSTED


TOOL_SEARCH = "tool_search"  # the type of a tool by which others are found, which costs nothing but tokens
OF_TOOL_SEARCH = ("tool_search_call", "tool_search_output", "additional_tools")  # types of items
# Types of tools that the upstream runs, and the unit of a usage in which each is counted. Older searches of the web
# have another price.
SEARCH_DATE = "_2025_08_26"  # may end the type of a search of the web
HOSTED = {
    "web_search": "web_searches",
    f"web_search{SEARCH_DATE}": "web_searches",
    "file_search": "file_searches",
    "code_interpreter": "containers",
    "image_generation": "images",
    "mcp": "",  # nothing but tokens
}
# Fields that only they have, and none of the caller's tools,
HOSTED_FIELDS = ResponsesTool.__struct_fields__[ResponsesTool.__struct_fields__.index("vector_store_ids") :]
# and fields that only items of their calls have, or of searches of tools; with the types of the former.
CALL_FIELDS = InputItem.__struct_fields__[InputItem.__struct_fields__.index("execution") :]
OF_HOSTED = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
    *("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"),
)


class FunctionChoice(Struct, frozen=True, tag="function"):
    name: str


class CustomChoice(Struct, frozen=True, tag="custom"):
    name: str


class SearchChoice(Struct, frozen=True, tag="web_search"):
    pass


class FileSearchChoice(Struct, frozen=True, tag="file_search"):
    pass


class CodeChoice(Struct, frozen=True, tag="code_interpreter"):
    pass


class PictureChoice(Struct, frozen=True, tag="image_generation"):
    pass


class McpChoice(Struct, frozen=True, tag="mcp", omit_defaults=True):
    server_label: str
    name: str | None = None  # of a tool of that server


ToolChoice = FunctionChoice | CustomChoice | SearchChoice | FileSearchChoice | CodeChoice | PictureChoice | McpChoice


class AllowedTools(Struct, frozen=True, tag="allowed_tools"):
    """Some of the tools, of which the model may or must call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[tuple[ToolChoice, ...], Meta(max_length=MOST_TOOLS)]


class SchemaFormat(Struct, frozen=True, tag="json_schema", omit_defaults=True):
    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # the older name of that
    context: str | None = None  # of which turns the thinking is shown
    mode: Literal["standard"] | None = None  # another has a price of its own


class ResponseStreamOptions(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class ContextEdit(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How the upstream is to make a conversation shorter while it answers: from so many tokens of it on."""

    type: Literal["compaction"]
    compact_threshold: int | None = None


class ConversationRef(Struct, frozen=True, forbid_unknown_fields=True):
    id: str


class ResponsesRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A request for a response. ``None`` means that the caller did not say."""

    model: str
    input: str | Annotated[tuple[InputItem, ...], Meta(max_length=MOST_MESSAGES)]
    instructions: str | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    tools: Annotated[tuple[ResponsesTool, ...], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None  # of tools that run at the upstream
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: (
        tuple[
            Literal[
                "reasoning.encrypted_content",
                "message.output_text.logprobs",
                "message.input_image.image_url",
                "file_search_call.results",
                "web_search_call.results",
                "web_search_call.action.sources",
                "computer_call_output.output.image_url",
                "code_interpreter_call.outputs",
            ],
            ...,
        ]
        | None
    ) = None
    truncation: Literal["auto", "disabled"] | None = None
    context_management: Annotated[tuple[ContextEdit, ...], Meta(max_length=MOST_TOOLS)] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationRef | None = None

    @property
    def conversation_id(self) -> str | None:
        """The id of the conversation that it goes on from, and adds to."""
        return self.conversation.id if isinstance(self.conversation, ConversationRef) else self.conversation

    @property
    def is_hosted(self) -> bool:
        """Whether the upstream may run tools of its own for it."""
        return any(tool.is_hosted for tool in self.tools or ())

    @property
    def paints(self) -> ResponsesTool | None:
        """The tool by which the upstream may make pictures for it."""
        return next((tool for tool in self.tools or () if tool.type == "image_generation"), None)

    @property
    def kind_of_its_own(self) -> str | None:
        """The type of a tool or of an item that no other API has in these words: the chat that this request is shows it
        to be counted, and cannot be asked of another model."""
        return self._place_of_its_own[1]

    def beside_chat(self) -> list[Any]:
        """Return what the request says in words of its callers and a chat has no place for: an upstream of this API is
        told it."""
        items = () if isinstance(self.input, str) else self.input
        parts = [part for item in items for content in (item.content, item.output) for part in content or ()]
        of_parts = [getattr(part, "annotations", None) for part in parts]
        searched = [item.call_id for item in items if item.type in OF_TOOL_SEARCH]
        of_items = [said for item in items for said in (told_id(item), item.phase, item.execution)]
        found: list[Any] = [tool for tool in self.tools or () if tool.is_hosted]
        found += [said for tool in self.tools or () for said in (tool.filters, tool.user_location, tool.execution)]
        context = None if self.reasoning is None else self.reasoning.context
        return [said for said in (*searched, *of_items, *of_parts, *found, context) if said]

    @property
    def place_of_its_own(self) -> str | None:
        """Where that stands."""
        return self._place_of_its_own[0]

    @property
    def _place_of_its_own(self) -> tuple[str | None, str | None]:
        for place, tool in enumerate(self.tools or ()):
            if tool.is_hosted or tool.type == TOOL_SEARCH:
                return f"tools[{place}].type", tool.type
        for place, item in enumerate(() if isinstance(self.input, str) else self.input):
            if item.type in OF_TOOL_SEARCH:
                return f"input[{place}]", item.type
            if item.type == "compaction":  # of an upstream of this API: a summary that was made here is words by now
                return f"input[{place}].encrypted_content", item.type
        return None, None


class InputTokensRequest(ResponsesRequest, frozen=True, omit_defaults=True, kw_only=True):
    """A request to count the tokens of a response's input; nothing is generated."""

    input: str | Annotated[tuple[InputItem, ...], Meta(max_length=MOST_MESSAGES)] = ()


class CompactRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A conversation to be made shorter. Clients that have ``tools`` in every request send them here, too."""

    model: str
    input: str | Annotated[tuple[InputItem, ...], Meta(max_length=MOST_MESSAGES)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[tuple[ResponsesTool, ...], Meta(max_length=MOST_TOOLS)] | None = None
    reasoning: ReasoningConfig | None = None
    prompt_cache_key: str | None = None


class Compaction(ResponsesRequest, frozen=True, omit_defaults=True, kw_only=True):
    """The response that sums a conversation up: its last item asks for that."""


# Ids of output items name their response, so that an item can be found by its id alone. One that an upstream of this
# API gave goes along at the end, and is the upstream's again where the item goes back.
_OWN = re.compile(r"([a-z]+)_([0-9a-f]{32})\d{4,}(?:_([\w-]+))?", re.ASCII)
_THEIRS = re.compile(r"([a-z]+)_([\w-]{1,128})", re.ASCII)


def item_id(prefix: str, suffix: str, place: int, theirs: str = "") -> str:
    """Return the id of the item at ``place`` in the response of that ``suffix``; ``theirs`` is what its upstream calls
    it, and says the prefix, too."""
    found = _THEIRS.fullmatch(theirs)
    return f"{prefix}_{suffix}{place:04}" if found is None else f"{found[1]}_{suffix}{place:04}_{found[2]}"


def upstreams_id(own: str | None) -> str | None:
    """Return what the upstream called an item that it gave; ``None`` for others."""
    found = _OWN.fullmatch(own or "")
    return f"{found[1]}_{found[3]}" if found is not None and found[3] else None


def told_id(item: InputItem) -> str | None:
    """Return the id by which an upstream is told an item: what it called it, or none; what a tool of its own did needs
    one, of whichever upstream."""
    return upstreams_id(item.id) or (item.id if item.type in OF_HOSTED else None)


def response_of_item(own: str | None) -> str | None:
    """Return the id of the response that an output item is of, by the item's."""
    found = _OWN.fullmatch(own or "")
    return f"resp_{found[2]}" if found else None
