# What OpenAI's Responses API accepts of a caller that has nothing stored there, written down strictly: the judge of
# every response that we ask of an upstream. Shares nothing with protocol/.

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tests.support.openai_rules import Metadata, Strict, Tokens, Violation, Words

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Status = Literal["in_progress", "completed", "incomplete"]
SEAL = "sealed-"  # begins what this upstream has thought, and then the id of its item


class Mark(Strict, frozen=True):
    mode: Literal["explicit"]


class InputText(Strict, tag="input_text", frozen=True):
    text: str
    prompt_cache_breakpoint: Mark | None = None


class OutputText(Strict, tag="output_text", frozen=True):
    text: str
    annotations: tuple[dict[str, Any], ...] = ()


class Refused(Strict, tag="refusal", frozen=True):
    refusal: str


class InputImage(Strict, tag="input_image", frozen=True):
    image_url: Words
    detail: Literal["auto", "low", "high"] = "auto"
    prompt_cache_breakpoint: Mark | None = None


class InputFile(Strict, tag="input_file", frozen=True):
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None


class Message(Strict, tag="message", kw_only=True, frozen=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | Refused | InputImage | InputFile]
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class Called(Strict, tag="function_call", kw_only=True, frozen=True):
    call_id: Words
    name: Words
    arguments: str
    namespace: str | None = None
    id: str | None = None
    status: Status | None = None


class CalledCustom(Strict, tag="custom_tool_call", kw_only=True, frozen=True):
    call_id: Words
    name: Words
    input: str
    namespace: str | None = None
    id: str | None = None
    status: Status | None = None


class Output(Strict, tag="function_call_output", kw_only=True, frozen=True):
    call_id: Words
    output: str | list[InputText | InputImage | InputFile]
    id: str | None = None
    status: Status | None = None


class CustomOutput(Output, tag="custom_tool_call_output", kw_only=True, frozen=True):
    pass


class Summary(Strict, tag="summary_text", frozen=True):
    text: str


class Thought(Strict, tag="reasoning", kw_only=True, frozen=True):
    summary: list[Summary]
    encrypted_content: Words  # without it, the item would be looked for among those that are stored
    content: list[dict[str, Any]] | None = None
    id: str | None = None
    status: Status | None = None


class Searched(Strict, tag="web_search_call", kw_only=True, frozen=True):
    id: Words
    action: dict[str, Any]
    status: str


class FilesSearched(Strict, tag="file_search_call", kw_only=True, frozen=True):
    id: Words
    queries: list[str]
    status: str
    results: list[dict[str, Any]] | None = None


class CodeRun(Strict, tag="code_interpreter_call", kw_only=True, frozen=True):
    id: Words
    code: str | None
    container_id: Words
    status: str
    outputs: list[dict[str, Any]] | None = None


class Painted(Strict, tag="image_generation_call", kw_only=True, frozen=True):
    id: Words
    result: str | None
    status: str


class ServerTool(Strict, kw_only=True, frozen=True):
    name: Words
    input_schema: dict[str, Any]
    description: str | None = None
    annotations: dict[str, Any] | None = None


class ServerTools(Strict, tag="mcp_list_tools", kw_only=True, frozen=True):
    id: Words
    server_label: Words
    tools: list[ServerTool]
    error: Any = None


class ServerCall(Strict, tag="mcp_call", kw_only=True, frozen=True):
    id: Words
    server_label: Words
    name: Words
    arguments: str
    output: str | None = None
    error: Any = None
    status: str | None = None
    approval_request_id: str | None = None


class ApprovalAsked(Strict, tag="mcp_approval_request", kw_only=True, frozen=True):
    id: Words
    server_label: Words
    name: Words
    arguments: str


class Approved(Strict, tag="mcp_approval_response", kw_only=True, frozen=True):
    approval_request_id: Annotated[str, Meta(pattern="^mcpr_up")]
    approve: bool
    id: str | None = None
    reason: str | None = None


class Compacted(Strict, tag="compaction", kw_only=True, frozen=True):
    encrypted_content: Words
    id: str | None = None


class Edit(Strict, kw_only=True, frozen=True):
    type: Literal["compaction"]
    compact_threshold: Annotated[int, Meta(ge=1)] | None = None


class ToolSearched(Strict, tag="tool_search_call", kw_only=True, frozen=True):
    arguments: dict[str, Any]
    call_id: str | None
    execution: Literal["client", "server"]
    status: Status | None = None
    id: str | None = None


class ToolsFound(Strict, tag="tool_search_output", kw_only=True, frozen=True):
    tools: list[dict[str, Any]]
    call_id: str | None
    execution: Literal["client", "server"]
    status: Status | None = None
    id: str | None = None


class Function(Strict, tag="function", kw_only=True, frozen=True):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolSearch(Strict, tag="tool_search", kw_only=True, frozen=True):
    execution: Literal["client", "server"] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Custom(Strict, tag="custom", kw_only=True, frozen=True):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    format: dict[str, Any] | None = None


class Namespace(Strict, tag="namespace", kw_only=True, frozen=True):
    name: Words
    tools: Annotated[list[Function | Custom], Meta(min_length=1)]
    description: str | None = None


class Search(Strict, tag="web_search", kw_only=True, frozen=True):
    filters: dict[str, Any] | None = None
    user_location: dict[str, Any] | None = None
    search_context_size: Literal["low", "medium", "high"] | None = None
    external_web_access: bool | None = None


class FileSearch(Strict, tag="file_search", kw_only=True, frozen=True):
    vector_store_ids: Annotated[list[Words], Meta(min_length=1)]
    max_num_results: Annotated[int, Meta(ge=1, le=50)] | None = None
    filters: dict[str, Any] | None = None
    ranking_options: dict[str, Any] | None = None


class NewContainer(Strict, tag="auto", kw_only=True, frozen=True):
    memory_limit: Literal["1g", "4g", "16g", "64g"] | None = None


class CodeInterpreter(Strict, tag="code_interpreter", kw_only=True, frozen=True):
    container: NewContainer


class Pictures(Strict, tag="image_generation", kw_only=True, frozen=True):
    model: Words | None = None
    quality: Literal["low", "medium", "high", "auto"] | None = None
    size: Words | None = None
    background: Literal["transparent", "opaque", "auto"] | None = None
    output_format: Literal["png", "webp", "jpeg"] | None = None


class Server(Strict, tag="mcp", kw_only=True, frozen=True):
    server_label: Words
    server_url: str | None = None
    connector_id: str | None = None
    server_description: str | None = None
    authorization: str | None = None
    headers: dict[str, str] | None = None
    allowed_tools: list[str] | dict[str, Any] | None = None
    require_approval: Literal["always", "never"] | dict[str, Any] | None = None


class Text(Strict, frozen=True):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Thinking(Strict, frozen=True):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None


class StreamOptions(Strict, frozen=True):
    include_obfuscation: bool | None = None


Offered = Function | Custom | Namespace | Search | ToolSearch | FileSearch | CodeInterpreter | Pictures | Server
Hosted = Searched | FilesSearched | CodeRun | Painted | ServerTools | ServerCall | ApprovalAsked | Approved
Item = (
    Message | Called | CalledCustom | Output | CustomOutput | Thought | ToolSearched | ToolsFound | Compacted | Hosted
)


class Counted(Strict, kw_only=True, frozen=True):
    model: Words
    input: Words | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    tools: Annotated[list[Offered], Meta(min_length=1, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: Thinking | None = None
    truncation: Literal["auto", "disabled"] | None = None


class Asked(Counted, kw_only=True, frozen=True):
    store: Literal[False]  # nothing of a team's is to stay there
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include: list[Words] | None = None
    max_output_tokens: Annotated[int, Meta(ge=16)] | None = None
    max_tool_calls: Tokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    context_management: list[Edit] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    user: Annotated[str, Meta(max_length=64)] | None = None
    safety_identifier: Annotated[str, Meta(max_length=64)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=64)] | None = None


def check_response(raw: bytes, kind: type[Counted]) -> dict[str, Any]:
    """Return the decoded body, or raise Violation for whatever the API would not take."""
    try:
        plain: dict[str, Any] = json.loads(raw)
        asked = msgspec.convert(plain, kind)
    except ValueError as exc:
        raise Violation(f"Invalid request: {exc}", code="invalid_request") from exc
    calls: set[str] = set()
    for place, item in enumerate(() if isinstance(asked.input, str) else asked.input):
        match item:
            case Called() | CalledCustom():
                calls.add(item.call_id)
            case Output() if item.call_id not in calls:
                raise Violation(f"No tool call found for function call output with call_id {item.call_id}.", "input")
            case Compacted() if item.encrypted_content != f"{SEAL}{item.id}":
                raise Violation("The encrypted content could not be verified.", code="invalid_encrypted_content")
            case Thought() if item.encrypted_content != f"{SEAL}{item.id}":
                words = "The encrypted content could not be verified. Reason: the item's id did not match."
                raise Violation(words, code="invalid_encrypted_content")
            case Message() | Called() if item.id is not None and not item.id.startswith(("msg_up", "fc_up")):
                raise Violation(f"Invalid 'input[{place}].id': '{item.id}'.", f"input[{place}].id", "invalid_value")
    return plain
