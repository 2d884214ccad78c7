# What Gemini's generateContent takes, written down a second time and strictly: the judge of every request in its
# format. Shares nothing with gateway/, so that a mistake there cannot excuse itself here.

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from tests.support.openai_rules import Violation

PATH = re.compile(
    r"(?:/v1beta|/v1/projects/[^/]+/locations/[^/]+/publishers/google)/models/([^/:?]+):(\w+)(\?alt=sse)?"
)
ALLOWED_HEADERS = {"accept", "accept-encoding", "connection", "content-length", "content-type", "host", "user-agent"}
ALLOWED_HEADERS |= {"authorization", "x-goog-api-key"}
UNSIGNED = "c2tpcF90aG91Z2h0X3NpZ25hdHVyZV92YWxpZGF0b3I="  # as Google's own package sends it
# Google, "Structured output": the part of JSON Schema that is known.
SCHEMA_WORDS = {"type", "format", "title", "description", "enum", "required", "properties", "additionalProperties"}
SCHEMA_WORDS |= {"items", "prefixItems", "minItems", "maxItems", "minimum", "maximum", "anyOf", "propertyOrdering"}
SCHEMA_WORDS |= {"$ref", "$defs", "$id", "$anchor"}
Words = Annotated[str, Meta(min_length=1)]
Name = Annotated[str, Meta(pattern=r"^[a-zA-Z_][a-zA-Z0-9_.:-]{0,63}$")]


class Strict(Struct, forbid_unknown_fields=True, frozen=True, rename="camel"):
    pass


class Inline(Strict, frozen=True):
    mime_type: Annotated[str, Meta(pattern=r"^[\w.+-]+/[\w.+-]+$")]
    data: Words


class Fetched(Strict, frozen=True):
    mime_type: Literal["image/bmp", "image/jpeg", "image/png", "image/webp", "application/pdf"]
    file_uri: Annotated[str, Meta(pattern="^https://")]


class Call(Strict, frozen=True):
    name: Name
    args: dict[str, Any]
    id: Words | None = None


class Result(Strict, frozen=True):
    name: Name
    response: dict[str, Any]
    id: Words | None = None


class Part(Strict, frozen=True):
    text: Words | None = None
    inline_data: Inline | None = None
    file_data: Fetched | None = None
    function_call: Call | None = None
    function_response: Result | None = None
    thought_signature: Words | None = None


class Content(Strict, frozen=True):
    role: Literal["user", "model"]
    parts: Annotated[list[Part], Meta(min_length=1)]


class Instructions(Strict, frozen=True):
    parts: Annotated[list[Part], Meta(min_length=1)]


class Declaration(Strict, frozen=True):
    name: Name
    description: Words
    parameters_json_schema: dict[str, Any] | None = None


class Tools(Strict, frozen=True):
    function_declarations: Annotated[list[Declaration], Meta(min_length=1)]


class Calling(Strict, frozen=True):
    mode: Literal["AUTO", "ANY", "NONE"]
    allowed_function_names: list[Name] | None = None


class ToolConfig(Strict, frozen=True):
    function_calling_config: Calling


class Thinking(Strict, frozen=True):
    thinking_budget: int | None = None
    thinking_level: Literal["minimal", "low", "medium", "high"] | None = None
    include_thoughts: bool | None = None


class Config(Strict, frozen=True):
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    stop_sequences: Annotated[list[Words], Meta(max_length=5)] | None = None
    response_mime_type: Literal["text/plain", "application/json"] | None = None
    response_json_schema: dict[str, Any] | None = None
    thinking_config: Thinking | None = None


class Body(Strict, frozen=True, kw_only=True):
    contents: Annotated[list[Content], Meta(min_length=1)]
    system_instruction: Instructions | None = None
    tools: list[Tools] | None = None
    tool_config: ToolConfig | None = None
    generation_config: Config | None = None
    safety_settings: list[dict[str, Any]] | None = None


class Embed(Strict, frozen=True):
    model: Annotated[str, Meta(pattern=r"^models/[^/]+$")]
    content: Instructions
    output_dimensionality: Annotated[int, Meta(ge=1)] | None = None


class Embeds(Strict, frozen=True):
    requests: Annotated[list[Embed], Meta(min_length=1, max_length=100)]


def check_embeds(raw: bytes) -> dict[str, Any]:
    """Return the decoded body of batchEmbedContents, or raise Violation."""
    try:
        plain: dict[str, Any] = json.loads(raw)
        msgspec.convert(plain, Embeds)
    except (ValueError, msgspec.ValidationError) as exc:
        raise Violation(f"Invalid JSON payload received. {exc}") from exc
    return plain


def sign(name: str) -> str:
    """Return the signature of a call of a function by the scripted upstream."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def check_headers(headers: dict[str, str]) -> None:
    """Raise Violation for a header that is missing, odd, or leaked from a client."""
    if strange := sorted(headers.keys() - ALLOWED_HEADERS):
        raise Violation(f"Headers that no provider should see: {', '.join(strange)}.")
    if headers.get("x-goog-api-key", "").startswith("sk-") == headers.get("authorization", "").startswith("Bearer sk-"):
        raise Violation("API key not valid. Please pass a valid API key.", code="API_KEY_INVALID")
    if headers.get("content-type") != "application/json":
        raise Violation("Content-Type must be application/json.")


def check_body(raw: bytes, model: str) -> dict[str, Any]:
    """Return the decoded body, or raise Violation for whatever Gemini would not take."""
    try:
        plain = json.loads(raw)
        body = msgspec.convert(plain, Body)
    except (ValueError, msgspec.ValidationError) as exc:
        raise Violation(f"Invalid JSON payload received. {exc}: Cannot find field.") from exc
    for content in body.contents:
        for part in content.parts:
            _check_part(part)
    _check_turns(body, is_newer=not re.search(r"gemini-[12]", model))
    declared = [one for tools in body.tools or () for one in tools.function_declarations]
    for one in declared:
        _check_schema(one.parameters_json_schema)
    config = body.generation_config or Config()
    _check_schema(config.response_json_schema)
    if config.response_json_schema is not None and config.response_mime_type != "application/json":
        raise Violation("responseJsonSchema needs a responseMimeType of application/json")
    calling = body.tool_config.function_calling_config if body.tool_config else None
    if calling is not None:
        if unknown := {*(calling.allowed_function_names or ())} - {one.name for one in declared}:
            raise Violation(f"allowed_function_names: {sorted(unknown)} are not declared")
        if calling.allowed_function_names and calling.mode != "ANY":
            raise Violation("allowed_function_names: the mode must be ANY")
    wants_json = config.response_mime_type == "application/json" and re.search(r"gemini-[12]", model)
    if wants_json and declared and (calling is None or calling.mode != "NONE"):
        raise Violation("Function calling with a response mime type: 'application/json' is unsupported")
    _check_thinking(config.thinking_config, model)
    return plain


def _check_part(part: Part) -> None:
    said = [part.text, part.inline_data, part.file_data, part.function_call, part.function_response]
    if sum(one is not None for one in said) != 1:
        raise Violation("required oneof field 'data' must have one initialized field")


def _check_turns(body: Body, *, is_newer: bool) -> None:
    """Turns alternate from the user on; each call is answered at the front of the next turn, by its name and id."""
    waiting: list[tuple[str | None, str]] = []
    for place, content in enumerate(body.contents):
        if (content.role == "user") != (place % 2 == 0):
            raise Violation("Please ensure that multiturn requests alternate between user and model.")
        results = [part.function_response for part in content.parts if part.function_response is not None]
        if sorted((result.id, result.name) for result in results) != sorted(waiting):
            raise Violation("Please ensure that the number of function response parts is equal to the number of "
                            "function call parts of the function call turn.")  # fmt: skip
        if any(part.function_response is not None for part in content.parts[len(results) :]):
            raise Violation("Please ensure that function response turn comes immediately after a function call turn.")
        calls = [part for part in content.parts if part.function_call is not None]
        waiting = [(part.function_call.id, part.function_call.name) for part in calls if part.function_call]
        if is_newer and calls:
            _check_signature(calls[0])


def _check_signature(part: Part) -> None:
    assert part.function_call is not None
    if part.thought_signature is None:
        raise Violation(f"Function call `{part.function_call.name}` is missing a `thought_signature`.")
    if part.thought_signature not in (UNSIGNED, sign(part.function_call.name)):
        raise Violation("Thought signature is not valid.")


def _check_thinking(thinking: Thinking | None, model: str) -> None:
    if thinking is None:
        return
    if thinking.thinking_level is not None and thinking.thinking_budget is not None:
        raise Violation("Thinking_budget and thinking_level are not supported together.")
    if thinking.thinking_level is not None and re.search(r"gemini-[12]", model):
        raise Violation("Thinking level is not supported for this model.")
    if re.search(r"gemini-2\.0|gemini-1", model):
        raise Violation("Thinking is not supported for this model.")
    if thinking.thinking_budget == 0 and "2.5-pro" in model:
        raise Violation("Budget 0 is invalid. This model only works in thinking mode.")


def _check_schema(schema: Any) -> None:
    if not isinstance(schema, dict):
        return
    if unknown := sorted(schema.keys() - SCHEMA_WORDS):
        raise Violation(f'Unknown name "{unknown[0]}" at a schema: Cannot find field.')
    if schema.get("type") == "object" and not schema.keys() - {"type"}:
        raise Violation("should be non-empty for OBJECT type")
    for key in ("properties", "$defs"):
        for inner in (schema.get(key) or {}).values():
            _check_schema(inner)
    for inner in (schema.get("items"), schema.get("additionalProperties"), *schema.get("anyOf", ())):
        _check_schema(inner)
