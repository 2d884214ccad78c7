# What Anthropic's Messages API accepts, written down a second time and strictly: the judge of what we send there.
# Shares nothing with gateway/providers, so that a mistake there cannot excuse itself here.

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


COUNTED = {"model", "messages", "system", "tools", "tool_choice", "thinking", "output_config"}
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


class Base64(Strict, tag="base64", frozen=True):
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: Words


class Url(Strict, tag="url", frozen=True):
    url: Annotated[str, Meta(pattern="^https://")]


class Image(Strict, tag="image", frozen=True):
    source: Base64 | Url
    cache_control: CacheControl | None = None


class ToolUse(Strict, tag="tool_use", frozen=True):
    id: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]+$")]
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,128}$")]
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResult(Strict, tag="tool_result", frozen=True):
    tool_use_id: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]+$")]
    content: str | list[Text | Image] | None = None
    is_error: bool = False
    cache_control: CacheControl | None = None


class Thinking(Strict, tag="thinking", frozen=True):
    thinking: str
    signature: Words


class RedactedThinking(Strict, tag="redacted_thinking", frozen=True):
    data: Words


class User(Strict, tag="user", tag_field="role", frozen=True):
    content: Words | Annotated[list[Text | Image | ToolResult], Meta(min_length=1)]


class Assistant(Strict, tag="assistant", tag_field="role", frozen=True):
    content: Words | Annotated[list[Text | ToolUse | Thinking | RedactedThinking], Meta(min_length=1)]


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
    display: Literal["summarized", "omitted"] | None = None


class Adaptive(Strict, tag="adaptive", frozen=True):
    display: Literal["summarized", "omitted"] | None = None


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
    tools: list[Tool] | None = None
    tool_choice: Auto | AnyTool | NamedTool | NoTool | None = None
    thinking: Enabled | Adaptive | BetweenTools | Disabled | None = None
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None
    cache_control: CacheControl | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


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


def check_body(raw: bytes, *, is_count: bool = False) -> dict[str, Any]:
    """Return the decoded body, or raise Violation for whatever Anthropic would not take."""
    try:
        plain = json.loads(raw)
        if is_count and (strange := sorted(plain.keys() - COUNTED)):
            raise Violation(f"{strange[0]}: Extra inputs are not permitted")
        body = msgspec.convert({"max_tokens": 1, **plain} if is_count else plain, Body)
    except (ValueError, msgspec.ValidationError) as exc:
        raise Violation(f"Invalid request: {exc}") from exc
    _check_turns(body)
    _check_marks(plain)
    if body.output_config is not None and body.output_config.format is not None:
        _check_binding(body.output_config.format.schema)
    for given in plain.get("tools") or ():
        if given.get("strict"):
            _check_binding(given["input_schema"])
    if body.tool_choice is not None and not body.tools:
        raise Violation("tool_choice may only be specified while providing tools")
    if isinstance(body.tool_choice, NamedTool) and body.tool_choice.name not in {
        tool.name for tool in body.tools or ()
    }:
        raise Violation("tool_choice.name: not in tools")
    if isinstance(body.thinking, Enabled | Adaptive) and isinstance(body.tool_choice, AnyTool | NamedTool):
        raise Violation("Thinking may not be enabled when tool_choice forces tool use.")
    if isinstance(body.thinking, Enabled | Adaptive) and body.temperature not in (None, 1):
        raise Violation("temperature may only be set to 1 when thinking is enabled.")
    return plain


def _check_turns(body: Body) -> None:
    """Turns alternate from the user on, every call is answered at the front of the very next turn, no text is empty."""
    waiting: list[str] = []
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
