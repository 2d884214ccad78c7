# What Anthropic's Messages API accepts, written down a second time and strictly: the judge of what we send there.
# Shares nothing with gateway/upstreams, so that a mistake there cannot excuse itself here.

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tests.support.openai_rules import Strict, Tokens, Violation, Words

ALLOWED_HEADERS = {
    "accept",
    "accept-encoding",
    "anthropic-beta",
    "anthropic-version",
    "connection",
    "content-length",
    "content-type",
    "host",
    "user-agent",
    "x-api-key",
}


COUNTED = {"model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "context_management"}
UNBINDING = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength"} | {
    "maxItems",
    "uniqueItems",
    "minProperties",
    "maxProperties",
}
FOREIGN = "EqQB"  # a signature that was not made here, and is taken for good


class CacheControl(Strict, frozen=True):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class Text(Strict, tag="text", frozen=True):
    text: Words
    cache_control: CacheControl | None = None
    citations: list[dict[str, Any]] | None = None


class Base64(Strict, tag="base64", frozen=True):
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: Words


class Url(Strict, tag="url", frozen=True):
    url: Annotated[str, Meta(pattern="^https://")]


class Image(Strict, tag="image", frozen=True):
    source: Base64 | Url
    cache_control: CacheControl | None = None


class Pdf(Strict, tag="base64", frozen=True):
    media_type: Literal["application/pdf"]
    data: Words


class Plain(Strict, tag="text", frozen=True):
    media_type: Literal["text/plain"]
    data: Words


class Content(Strict, tag="content", frozen=True):
    content: Words | list[Text | Image]


class Citations(Strict, frozen=True):
    enabled: bool


class Document(Strict, tag="document", frozen=True):
    source: Pdf | Plain | Content | Url
    title: Words | None = None
    context: Words | None = None
    citations: Citations | None = None
    cache_control: CacheControl | None = None


class SearchResult(Strict, tag="search_result", frozen=True):
    source: Words
    title: Words
    content: Annotated[list[Text], Meta(min_length=1)]
    citations: Citations | None = None
    cache_control: CacheControl | None = None


class ToolUse(Strict, tag="tool_use", frozen=True):
    id: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]+$")]
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,128}$")]
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None


class ServerToolUse(Strict, tag="server_tool_use", frozen=True):
    id: Annotated[str, Meta(pattern="^srvtoolu_[a-zA-Z0-9_]+$")]
    name: Literal["web_search", "web_fetch", "bash_code_execution", "text_editor_code_execution"]
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None


class SearchError(Strict, tag="web_search_tool_result_error", frozen=True):
    error_code: Words


class FoundPage(Strict, tag="web_search_result", frozen=True):
    url: Words
    title: str
    encrypted_content: Words
    page_age: str | None = None


class WebSearchResult(Strict, tag="web_search_tool_result", frozen=True):
    tool_use_id: Annotated[str, Meta(pattern="^srvtoolu_[a-zA-Z0-9_]+$")]
    content: list[FoundPage] | SearchError
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None


class FetchedPage(Strict, tag="web_fetch_result", frozen=True):
    url: Words
    content: Document
    retrieved_at: str | None = None


class FetchError(Strict, tag="web_fetch_tool_result_error", frozen=True):
    error_code: Words


class WebFetchResult(Strict, tag="web_fetch_tool_result", frozen=True):
    tool_use_id: Annotated[str, Meta(pattern="^srvtoolu_[a-zA-Z0-9_]+$")]
    content: FetchedPage | FetchError
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None


class CodeFile(Strict, tag="bash_code_execution_output", frozen=True):
    file_id: Words


class CodeOutput(Strict, tag="bash_code_execution_result", frozen=True):
    stdout: str
    stderr: str
    return_code: int
    content: list[CodeFile]


class CodeError(Strict, tag="bash_code_execution_tool_result_error", frozen=True):
    error_code: Words


class CodeResult(Strict, tag="bash_code_execution_tool_result", frozen=True):
    tool_use_id: Annotated[str, Meta(pattern="^srvtoolu_[a-zA-Z0-9_]+$")]
    content: CodeOutput | CodeError
    cache_control: CacheControl | None = None


class ToolResult(Strict, tag="tool_result", frozen=True):
    tool_use_id: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]+$")]
    content: str | list[Text | Image | Document | SearchResult] | None = None
    is_error: bool = False
    cache_control: CacheControl | None = None


class Thinking(Strict, tag="thinking", frozen=True):
    thinking: str
    signature: Words


class RedactedThinking(Strict, tag="redacted_thinking", frozen=True):
    data: Words


class User(Strict, tag="user", tag_field="role", frozen=True):
    content: Words | Annotated[list[Text | Image | Document | SearchResult | ToolResult], Meta(min_length=1)]


class Assistant(Strict, tag="assistant", tag_field="role", frozen=True):
    content: (
        Words
        | Annotated[
            list[
                Text
                | ToolUse
                | Thinking
                | RedactedThinking
                | ServerToolUse
                | WebSearchResult
                | WebFetchResult
                | CodeResult
            ],
            Meta(min_length=1),
        ]
    )


class Instructions(Strict, tag="system", tag_field="role", frozen=True):
    content: Words | Annotated[list[Text], Meta(min_length=1)]


class InputSchema(msgspec.Struct, frozen=True):
    type: Literal["object"]


class Tool(Strict, frozen=True):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,128}$")]
    input_schema: InputSchema
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    input_examples: list[dict[str, Any]] | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None


class ClientTool(Strict, frozen=True, kw_only=True):
    """A tool that the model knows by its type."""

    type: Literal[
        "bash_20250124", "text_editor_20250124", "text_editor_20250429", "text_editor_20250728", "memory_20250818"
    ]
    name: Literal["bash", "str_replace_editor", "str_replace_based_edit_tool", "memory"]
    max_characters: int | None = None
    cache_control: CacheControl | None = None


class Computer(Strict, frozen=True, kw_only=True):
    type: Literal["computer_20250124", "computer_20251124"]
    name: Literal["computer"]
    display_width_px: int
    display_height_px: int
    display_number: int | None = None
    enable_zoom: bool | None = None
    cache_control: CacheControl | None = None


class WebSearch(Strict, frozen=True, kw_only=True):
    type: Literal["web_search_20250305"]
    name: Literal["web_search"]
    max_uses: Annotated[int, Meta(ge=1)] | None = None
    allowed_domains: list[Words] | None = None
    blocked_domains: list[Words] | None = None
    user_location: dict[str, Any] | None = None
    cache_control: CacheControl | None = None


class WebFetch(Strict, frozen=True, kw_only=True):
    type: Literal["web_fetch_20250910"]
    name: Literal["web_fetch"]
    max_uses: Annotated[int, Meta(ge=1)] | None = None
    allowed_domains: list[Words] | None = None
    blocked_domains: list[Words] | None = None
    max_content_tokens: Tokens | None = None
    citations: Citations | None = None
    url_sources: dict[str, Any] | None = None
    cache_control: CacheControl | None = None


class CodeExecution(Strict, frozen=True, kw_only=True):
    type: Literal["code_execution_20250825"]
    name: Literal["code_execution"]
    cache_control: CacheControl | None = None


CONTEXT_BETA = "context-management-2025-06-27"
BETAS = {"computer_20250124": "computer-use-2025-01-24", "computer_20251124": "computer-use-2025-11-24"}
BETAS |= {"memory_20250818": CONTEXT_BETA}
ASKED_FOR = {"interleaved-thinking-2025-05-14", "fine-grained-tool-streaming-2025-05-14", "claude-code-20250219"}
UPDATES_BETA = "thinking-display-updates-2026-08-18"
ASKED_FOR |= {"effort-2025-11-24", "structured-outputs-2025-11-13", CONTEXT_BETA}


class Edit(Strict, frozen=True):
    type: Literal["clear_tool_uses_20250919", "clear_thinking_20251015"]
    trigger: dict[str, Any] | None = None
    keep: dict[str, Any] | Literal["all"] | None = None
    clear_at_least: dict[str, Any] | None = None
    clear_tool_inputs: bool | list[str] | None = None
    exclude_tools: list[str] | None = None


class ContextManagement(Strict, frozen=True):
    edits: list[Edit]


class Auto(Strict, tag="auto", frozen=True):
    disable_parallel_tool_use: bool = False


class AnyTool(Strict, tag="any", frozen=True):
    disable_parallel_tool_use: bool = False


class NamedTool(Strict, tag="tool", frozen=True):
    name: Words
    disable_parallel_tool_use: bool = False


class NoTool(Strict, tag="none", frozen=True):
    pass


class Enabled(Strict, tag="enabled", frozen=True):
    budget_tokens: Annotated[int, Meta(ge=1024)]
    display: Literal["summarized", "omitted", "updates"] | None = None


class Adaptive(Strict, tag="adaptive", frozen=True):
    display: Literal["summarized", "omitted", "updates"] | None = None


class BetweenTools(Strict, tag="between_tools", frozen=True):
    pass


class Disabled(Strict, tag="disabled", frozen=True):
    pass


class JsonFormat(Strict, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Strict, frozen=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None
    task_budget: dict[str, Any] | None = None


class Metadata(Strict, frozen=True):
    user_id: str | None = None


class Body(Strict, kw_only=True, frozen=True):
    model: Words
    max_tokens: Tokens
    messages: Annotated[list[User | Assistant | Instructions], Meta(min_length=1)]
    system: str | list[Text] | None = None
    stream: bool = False
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    stop_sequences: list[Annotated[str, Meta(pattern=r"\S")]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Auto | AnyTool | NamedTool | NoTool | None = None
    thinking: Enabled | Adaptive | BetweenTools | Disabled | None = None
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None
    cache_control: CacheControl | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    context_management: ContextManagement | None = None


def sign(thought: str) -> str:
    """Return the signature of a thought of the scripted upstream's."""
    return "scripted-" + hashlib.sha256(thought.encode()).hexdigest()


def check_headers(headers: dict[str, str]) -> None:
    """Raise Violation for a header that is missing, odd, or leaked from a client."""
    if strange := sorted(headers.keys() - ALLOWED_HEADERS):
        raise Violation(f"Headers that no provider should see: {', '.join(strange)}.", code="leaked_header")
    if not headers.get("x-api-key", "").startswith("sk-"):
        raise Violation("invalid x-api-key", code="authentication_error", status=401)
    if headers.get("anthropic-version") != "2023-06-01":
        raise Violation("anthropic-version: header is required")
    if headers.get("content-type") != "application/json":
        raise Violation("content-type: must be application/json", status=415)


def check_body(raw: bytes, headers: dict[str, str] | None = None, *, is_count: bool = False) -> dict[str, Any]:
    """Return the decoded body, or raise Violation for whatever Anthropic would not take."""
    try:
        plain = json.loads(raw)
        if is_count and (strange := sorted(plain.keys() - COUNTED)):
            raise Violation(f"{strange[0]}: Extra inputs are not permitted")
        body = msgspec.convert({"max_tokens": 1, **plain} if is_count else plain, Body)
    except (ValueError, msgspec.ValidationError) as exc:
        raise Violation(f"Invalid request: {exc}") from exc
    _check_betas(plain, headers or {})
    _check_turns(body)
    _check_marks(plain)
    if body.output_config is not None and body.output_config.format is not None:
        _check_binding(body.output_config.format.schema)
    for given in plain.get("tools") or ():
        _check_tool(given)
        if given.get("strict"):
            _check_binding(given["input_schema"])
    if body.tool_choice is not None and not body.tools:
        raise Violation("tool_choice may only be specified while providing tools")
    if isinstance(body.tool_choice, NamedTool) and body.tool_choice.name not in {
        tool["name"] for tool in body.tools or ()
    }:
        raise Violation("tool_choice.name: not in tools")
    _check_thinking(body, is_count=is_count)
    _check_generation(body)
    return plain


def _check_tool(given: dict[str, Any]) -> None:
    kind = given.get("type", "custom")
    try:
        own = {"custom": Tool, "web_search_20250305": WebSearch, "web_fetch_20250910": WebFetch}
        own |= {"code_execution_20250825": CodeExecution}
        ruled = own.get(kind) or (Computer if kind.startswith("computer_") else ClientTool)
        msgspec.convert(given, ruled)
    except msgspec.ValidationError as exc:
        raise Violation(f"tools: {exc}") from exc


def _check_betas(plain: dict[str, Any], headers: dict[str, str]) -> None:
    """What belongs to a beta comes with it, and no beta is named that nothing asks for but a few that callers may."""
    named = set(filter(None, headers.get("anthropic-beta", "").split(",")))
    needed = {BETAS[tool["type"]] for tool in plain.get("tools") or () if tool.get("type") in BETAS}
    needed |= {CONTEXT_BETA} if plain.get("context_management") else set()
    needed |= {"task-budgets-2026-03-13"} if (plain.get("output_config") or {}).get("task_budget") else set()
    needed |= {UPDATES_BETA} if (plain.get("thinking") or {}).get("display") == "updates" else set()
    if needed - named or named - needed - ASKED_FOR:
        raise Violation(f"tools: betas {sorted(needed)} are needed, {sorted(named)} are named")


def _check_thinking(body: Body, *, is_count: bool) -> None:
    """What no model takes together with thinking."""
    if isinstance(body.thinking, Enabled) and not is_count and body.thinking.budget_tokens >= body.max_tokens:
        raise Violation("`max_tokens` must be greater than `thinking.budget_tokens`.")
    if not isinstance(body.thinking, Enabled | Adaptive):
        return
    if isinstance(body.tool_choice, AnyTool | NamedTool):
        raise Violation("Thinking may not be enabled when tool_choice forces tool use.")
    if body.temperature not in (None, 1):
        raise Violation("temperature may only be set to 1 when thinking is enabled or in adaptive mode.")
    if body.top_k:
        raise Violation("top_k must be unset when thinking is enabled or in adaptive mode.")
    if body.top_p is not None and body.top_p < 0.95:
        raise Violation("top_p must be greater than or equal to 0.95 or unset when thinking is enabled.")
    last = next((turn for turn in reversed(body.messages) if isinstance(turn, Assistant)), None)
    blocks = last.content if last is not None and isinstance(last.content, list) else []
    is_tool_turn = any(isinstance(block, ToolUse) for block in blocks) and isinstance(body.messages[-1], User)
    if isinstance(body.thinking, Enabled) and is_tool_turn and not isinstance(blocks[0], Thinking | RedactedThinking):
        raise Violation("Expected `thinking` or `redacted_thinking`, but found `tool_use`: a final assistant message "
                        "must start with a thinking block")  # fmt: skip


def _check_generation(body: Body) -> None:
    """What a generation of Claude does not take. By example: what the API said of each model."""
    kind = "unsaid" if body.thinking is None else type(body.thinking).__struct_config__.tag
    effort = None if body.output_config is None else body.output_config.effort
    takes = GENERATIONS.get(body.model)
    if takes is None:
        return
    if kind not in takes.thinking:
        raise Violation(f'"thinking.type.{kind}" is not supported for this model.')
    if effort is not None and effort not in takes.efforts:
        raise Violation(f"This model does not support the effort level {effort!r}.")
    if effort in ("xhigh", "max") and kind in ("disabled", "between_tools"):
        raise Violation(f"output_config.effort {effort!r} is not supported when thinking is disabled on this model.")
    if takes.samplers == 0 and (body.temperature not in (None, 1) or body.top_p not in (None, 1) or body.top_k):
        raise Violation("`temperature` is deprecated for this model.")
    if takes.samplers == 1 and body.temperature is not None and body.top_p is not None:
        raise Violation("`temperature` and `top_p` cannot both be specified for this model. Please use only one.")
    if isinstance(body.tool_choice, AnyTool | NamedTool):
        if not takes.forced_tools:
            raise Violation("tool_choice: forced tool use is not supported for this model.")
        if takes.thinks_unasked and kind not in ("disabled", "between_tools"):
            raise Violation("Thinking may not be enabled when tool_choice forces tool use.")
    if isinstance(body.messages[-1], Assistant) and not takes.prefill:
        raise Violation(
            "This model does not support assistant message prefill. The conversation must end with a user message."
        )
    if body.output_config is not None and body.output_config.format is not None and not takes.formats:
        raise Violation("output_config.format: this model does not support structured outputs.")
    if body.max_tokens > takes.max_output:
        raise Violation(f"max_tokens: {body.max_tokens} > {takes.max_output}, which is the maximum for {body.model}")


class Generation(Strict, frozen=True, kw_only=True):
    """What one model takes. ``samplers``: how many of temperature and top_p."""

    thinking: tuple[str, ...] = ("unsaid", "adaptive", "disabled")
    efforts: tuple[str, ...] = ("low", "medium", "high", "xhigh", "max")
    samplers: int = 0
    thinks_unasked: bool = True
    forced_tools: bool = True
    prefill: bool = False
    formats: bool = True
    max_output: int = 128_000


OLD: dict[str, Any] = {"thinking": ("unsaid", "disabled"), "efforts": (), "samplers": 2}
OLD |= {"thinks_unasked": False, "prefill": True, "formats": False}
BUDGETED: dict[str, Any] = OLD | {"thinking": ("unsaid", "enabled", "disabled")}
BOUND: dict[str, Any] = BUDGETED | {"samplers": 1, "formats": True}
ALWAYS_ON: dict[str, Any] = {"thinking": ("unsaid", "adaptive"), "forced_tools": False}
GENERATIONS = {
    "claude-3-haiku-20240307": Generation(**OLD | {"max_output": 4_096}),
    "claude-3-5-sonnet-20241022": Generation(**OLD | {"max_output": 8_192}),
    "claude-3-7-sonnet-20250219": Generation(**BUDGETED | {"max_output": 64_000}),
    "claude-sonnet-4-20250514": Generation(**BUDGETED | {"max_output": 64_000}),
    "claude-opus-4-1-20250805": Generation(**BOUND | {"max_output": 32_000}),
    "claude-sonnet-4-5-20250929": Generation(**BOUND | {"max_output": 64_000}),
    "claude-haiku-4-5": Generation(**BOUND | {"max_output": 64_000}),
    "claude-opus-4-6": Generation(
        thinking=("unsaid", "enabled", "adaptive", "disabled"),
        efforts=("low", "medium", "high", "max"),
        samplers=1,
        thinks_unasked=False,
    ),
    "claude-opus-4-7": Generation(thinking=("unsaid", "adaptive"), thinks_unasked=False),
    "claude-sonnet-5": Generation(),
    "claude-opus-5": Generation(),
    "claude-opus-5-5": Generation(**ALWAYS_ON),
    "claude-fable-5-2": Generation(**ALWAYS_ON),
    "claude-sonnet-5-5": Generation(thinking=("unsaid", "adaptive", "between_tools"), forced_tools=False),
    "claude-haiku-5-5": Generation(forced_tools=False),
}


def _check_turns(body: Body) -> None:
    """Turns alternate from the user on, every call is answered at the front of the very next turn, no text is empty."""
    waiting: list[str] = []
    made: set[str] = set()
    if isinstance(body.messages[0], Instructions):
        raise Violation("messages.0: the first message must use the user role; instructions are the top-level system")
    spoken = [turn for turn in body.messages if not isinstance(turn, Instructions)]
    for place, turn in enumerate(spoken):
        if isinstance(turn, User) != (place % 2 == 0):
            raise Violation(f"messages.{place}: roles must alternate, and begin with user")
        blocks = turn.content if isinstance(turn.content, list) else []
        for block in blocks:
            if isinstance(block, Thinking) and block.signature not in (FOREIGN, sign(block.thinking)):
                raise Violation(f"messages.{place}: Invalid `signature` in `thinking` block")
        if blocks and isinstance(blocks[-1], Thinking | RedactedThinking):
            raise Violation(f"messages.{place}: the final block in an assistant message cannot be `thinking`")
        results = [block.tool_use_id for block in blocks if isinstance(block, ToolResult)]
        if sorted(results) != sorted(waiting):
            raise Violation(f"messages.{place}: each tool_use block must have its tool_result in the next message")
        if any(isinstance(block, ToolResult) for block in blocks[len(results) :]):
            raise Violation(f"messages.{place}: tool_result blocks come first")
        texts = [turn.content] if isinstance(turn.content, str) else [b.text for b in blocks if isinstance(b, Text)]
        if any(not text.strip() for text in texts):
            raise Violation(f"messages.{place}: text content blocks must contain non-whitespace text")
        waiting = [block.id for block in blocks if isinstance(block, ToolUse)]
        if len(made) + len(waiting) != len(made := made | set(waiting)):
            raise Violation(f"messages.{place}: `tool_use` ids must be unique")
        if isinstance(turn, Assistant) and turn is body.messages[-1] and texts and texts[-1] != texts[-1].rstrip():
            raise Violation("final assistant content cannot end with trailing whitespace")
    if waiting:
        raise Violation("messages: tool_use ids were found without tool_result blocks")


def _check_binding(schema: Any) -> None:
    """What a model is held to has closed objects, and bounds nothing but what it is made of."""
    if not isinstance(schema, dict):
        return
    kind = schema.get("type")
    if kind == "object" and schema.get("additionalProperties") is not False:
        raise Violation("For 'object' type, 'additionalProperties' must be explicitly set to false")
    if unknown := sorted(schema.keys() & UNBINDING):
        raise Violation(f"For '{kind}' type, property '{unknown[0]}' is not supported")
    if schema.get("minItems") not in (None, 0, 1):
        raise Violation("For 'array' type, 'minItems' values other than 0 or 1 are not supported")
    if "oneOf" in schema or ("$ref" in schema and schema.keys() - {"$ref", "$defs", "definitions"}):
        raise Violation("'oneOf', and anything beside '$ref', is not supported")
    named = [schema.get(key) or {} for key in ("properties", "$defs", "definitions")]
    for inner in (*(each for group in named for each in group.values()), schema.get("items")):
        _check_binding(inner)
    for each in (*schema.get("anyOf", ()), *schema.get("allOf", ())):
        _check_binding(each)


def _check_marks(plain: Any) -> None:
    if json.dumps(plain).count('"cache_control"') > 4:
        raise Violation("A maximum of 4 blocks with cache_control may be provided.")
