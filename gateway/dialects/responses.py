# OpenAI's Responses API: what is checked of a request, which chat it is, and its rows in the table of endpoints. What
# it stores and seals is gateway/stored_responses/'s.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from gateway.dialects.checks import require, require_between
from gateway.dialects.endpoint import ApiEndpoint, Asked, Error, ErrorShape
from gateway.dialects.hosted_tools import check_hosted
from gateway.dialects.messages import MOST_USES
from gateway.dialects.responses_writer import CompactionWriter, ResponsesWriter
from protocol.chat import MOST_TOOLS
from protocol.decoding import MAX_VALUES, has_more_values
from protocol.errors import BadRequest, ServiceError, UnsupportedParameter, not_supported
from protocol.response_tools import chosen_name, offered_tools
from protocol.responses import (
    TOOL_SEARCH,
    AllowedTools,
    CodeChoice,
    Compaction,
    CompactRequest,
    CustomChoice,
    FileSearchChoice,
    FunctionChoice,
    InputFile,
    InputItem,
    InputTokensRequest,
    McpChoice,
    PictureChoice,
    ResponsesRequest,
    ResponsesTool,
    SearchChoice,
)
from protocol.responses_to_chat import to_chat, without_compacted

RESEND = "send the items of the turns before in 'input'."
# What a model is asked at the end of a conversation that is to be made shorter (docs/dialects.md has it, too).
COMPACT = """\
The conversation above is about to be replaced by your summary of it, and another model, which sees nothing else of it \
but what the user said, will go on from there. Write that summary and nothing else. Say what is wanted and for which \
reasons; what was done and decided, with names, numbers, paths, code and results of tools as they were, where they \
still matter; what failed, so that it is not tried again; how things stand now; and what remains to be done next. Do \
not answer the user and call no tool."""
# Fields that change what is answered and cannot be kept to, with what would be right.
UNSUPPORTED: Mapping[str, str] = {
    "prompt": "Prompts are not stored here: send 'instructions' and 'input'.",
}
# What a chat calls the same, in errors that come from further in and in names of what was left out.
AS_RESPONSE: Mapping[str, str] = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "thinking_blocks": "input.reasoning",
    "verbosity": "text.verbosity",
}
# Whatever an embedding, whose 'input' may be the same text, has no use for.
KEPT = ("item_reference", "compaction")  # types of items that only the gateway can read
SIGNS = frozenset(ResponsesRequest.__struct_fields__) - {"model", "input", "user", "metadata"}


def check_response(asked: ResponsesRequest) -> None:
    """Refuse what the types let through and this API, or this gateway, does not take. Raises BadRequest."""
    require(bool(asked.input), "input", "'input' must hold a text or at least one item.")
    require_between(asked.max_output_tokens, 1, 2**31, "max_output_tokens")
    require_between(asked.max_tool_calls, 0, MOST_USES if asked.is_hosted else 2**31, "max_tool_calls")
    require_between(asked.temperature, 0, 2, "temperature")
    require_between(asked.top_p, 0, 1, "top_p")
    require_between(asked.top_logprobs, 0, 20, "top_logprobs")
    for place, edit in enumerate(asked.context_management or ()):
        where = f"context_management[{place}].compact_threshold"
        require_between(edit.compact_threshold, 1, 2**31, where)
    require(asked.stream_options is None or bool(asked.stream), "stream_options", "'stream_options' needs 'stream'.")
    can_load = any(tool.type == TOOL_SEARCH for tool in asked.tools or ())
    for place, tool in enumerate(asked.tools or ()):
        _check_tool(tool, f"tools[{place}]", can_load=can_load)
    names = [offered.called for offered in offered_tools(asked)]
    require(len(names) <= MOST_TOOLS, "tools", f"'tools' holds more than {MOST_TOOLS} tools. Send fewer.")
    require(len(names) == len(set(names)), "tools", "Two of 'tools' have one name. Give each its own.")
    _check_choice(asked, frozenset(names))
    words = "A response in the background is read once it is stored: leave 'store' out, or 'background'."
    require(not (asked.background and asked.store is False), "background", words)
    words = "A response in the background is added to no conversation: leave 'conversation' out, or 'background'."
    require(not (asked.background and asked.conversation), "background", words)
    words = "A response goes on from a conversation or from a response. Send 'conversation' or 'previous_response_id'."
    require(not (asked.previous_response_id and asked.conversation), "previous_response_id", words)
    items = () if isinstance(asked.input, str) else asked.input
    said = "".join([item.arguments for item in items if isinstance(item.arguments, str)])
    is_short = not has_more_values(said.encode("utf-8", "replace"), MAX_VALUES)
    require(is_short, "input", f"'input' holds calls whose arguments have more than {MAX_VALUES} values.")


def _check_tool(tool: ResponsesTool, where: str, *, can_load: bool) -> None:
    require(bool(tool.type), f"{where}.type", f"'{where}' needs a 'type'.")
    if tool.type == "namespace" and "." not in where:
        require(bool(tool.tools), f"{where}.tools", f"'{where}' needs 'tools'.")
        for place, inner in enumerate(tool.tools or ()):
            _check_tool(inner, f"{where}.tools[{place}]", can_load=can_load)
    elif (tool.is_hosted or tool.type == TOOL_SEARCH) and "." not in where:
        check_hosted(tool, where)
        return
    elif tool.type not in ("function", "custom"):
        raise UnsupportedParameter(
            f"A tool of type '{tool.type[:64]}' is not supported by this gateway. Send tools of type 'function' or "
            "'custom', which your own program runs.",
            param=f"{where}.type",
        )
    require(bool(tool.name), f"{where}.name", f"'{where}' needs a 'name'.")
    words = f"'{where}' cannot be loaded later: there is no tool of type 'tool_search'. Leave 'defer_loading' out."
    require(can_load or not tool.defer_loading, f"{where}.defer_loading", words)


def _check_choice(asked: ResponsesRequest, names: frozenset[str]) -> None:
    is_moot = asked.tool_choice in (None, "auto", "none")  # clients say so with no tools at hand
    require(is_moot or bool(asked.tools), "tool_choice", "'tool_choice' needs 'tools'.")
    match asked.tool_choice:
        case FunctionChoice(name) | CustomChoice(name):
            require(name in names, "tool_choice.name", "'tool_choice' names a tool that 'tools' has not.")
        case AllowedTools(tools=tools):
            are_known = bool(tools) and all(chosen_name(tool) in names for tool in tools)
            require(are_known, "tool_choice.tools", "'tool_choice.tools' must name some of 'tools'.")
        case SearchChoice() | FileSearchChoice() | CodeChoice() | PictureChoice() | McpChoice() as choice:
            is_known = chosen_name(choice) in names
            require(is_known, "tool_choice.type", "'tool_choice' names a tool that 'tools' has not.")


def as_chat(asked: ResponsesRequest, extra: dict[str, Any]) -> Asked:
    """Return a response as the chat that it is, beside itself. What no target is told joins the fields that are
    unknown to us, whose names the answer's header has. Raises BadRequest."""
    for name in UNSUPPORTED.keys() & extra.keys():
        if extra.pop(name):
            raise not_supported(name, UNSUPPORTED[name])
    extra |= dict(_untold(asked))
    if goes_on(asked):  # the items before and those referred to are known later
        return Asked(to_chat(asked), extra, asked, goes_on=True)
    return as_chat_after((), asked, extra)


def goes_on(asked: ResponsesRequest) -> bool:
    """Whether a request needs stored items, or has sealed ones."""
    refers = not isinstance(asked.input, str) and any(item.type in KEPT for item in asked.input)
    return asked.previous_response_id is not None or asked.conversation is not None or refers


def check_count(asked: InputTokensRequest) -> None:
    """Refuse what ``check_response`` does, but for an input that is not there: instructions are counted alone, too.
    Raises BadRequest."""
    check_response(asked if asked.input else replace(asked, input=" "))
    has_any = asked.input or asked.instructions or asked.previous_response_id or asked.conversation
    require(bool(has_any), "input", "There is nothing to count: send 'input'.")


def check_compact(asked: CompactRequest) -> None:
    """Refuse what the types let through: nothing to sum up, and tools as ``check_response`` does. Raises BadRequest."""
    has_any = bool(asked.input) or asked.previous_response_id is not None
    require(has_any, "input", "There is nothing to compact: send 'input', 'previous_response_id' or both.")
    check_response(_compaction(asked))


def as_compaction(asked: CompactRequest, extra: dict[str, Any]) -> Asked:
    """Return what is to be made shorter as the response that sums it up. Raises BadRequest."""
    return as_chat(_compaction(asked), extra)


def _compaction(asked: CompactRequest) -> Compaction:
    given = asked.input or ()
    items = (InputItem(role="user", content=given),) if isinstance(given, str) else given
    return Compaction(
        model=asked.model,
        input=(*items, InputItem(role="user", content=COMPACT)),
        instructions=asked.instructions,
        previous_response_id=asked.previous_response_id,
        tools=asked.tools,
        tool_choice="none" if asked.tools else None,  # known, as calls of them may be in the conversation
        reasoning=asked.reasoning,
        prompt_cache_key=asked.prompt_cache_key,
        store=False,
    )


def as_chat_after(before: tuple[InputItem, ...], asked: ResponsesRequest, extra: dict[str, Any]) -> Asked:
    """Return a request after the items of the turns ``before``. Raises BadRequest."""
    before = without_compacted(before, own_items(asked))
    chat = to_chat(asked, before)
    require(bool(chat.messages), "input", "'input' holds nothing that a model could read.")
    return Asked(chat, extra, asked, shown=replace(asked, input=(*before, *own_items(asked))) if before else asked)


def own_items(asked: ResponsesRequest) -> tuple[InputItem, ...]:
    """Return the input of a request as items."""
    given = asked.input
    return (InputItem(role="user", content=given),) if isinstance(given, str) else given


def check_items(items: tuple[InputItem, ...], where: str) -> None:
    """Refuse items that no model could be told; ``where`` they stand. Raises BadRequest."""
    for place, item in enumerate(items):
        words = f"'{where}[{place}]' refers to an item. Send the item itself."
        require(item.type != "item_reference", f"{where}[{place}]", words)
    try:
        to_chat(ResponsesRequest(model="", input=items))
    except BadRequest as exc:
        param = (exc.param or "input").replace("input", where, 1)
        raise BadRequest(exc.message.replace("'input", f"'{where}"), param=param, code=exc.code) from exc


def _untold(asked: ResponsesRequest) -> Iterator[tuple[str, Any]]:
    """Yield what is left out, as nothing here can do it and the answer means the same without."""
    if asked.truncation == "auto":
        yield "truncation", "auto"
    if asked.context_management:
        yield "context_management", asked.context_management
    if asked.reasoning is not None and (asked.reasoning.summary or asked.reasoning.generate_summary):
        yield "reasoning.summary", asked.reasoning.summary or asked.reasoning.generate_summary
    if asked.reasoning is not None and asked.reasoning.context:
        yield "reasoning.context", asked.reasoning.context
    thoughts = [item for item in asked.input if not isinstance(item, str) and item.type == "reasoning"]
    if not all(item.encrypted_content for item in thoughts):
        yield "input.reasoning", True
    items = () if isinstance(asked.input, str) else asked.input
    parts = [part for item in items for content in (item.content, item.output) for part in content or ()]
    if any(getattr(part, "prompt_cache_breakpoint", None) for part in parts):
        yield "input.prompt_cache_breakpoint", True
    if any(isinstance(part, InputFile) and part.detail not in (None, "auto") for part in parts):
        yield "input.input_file.detail", True


def _error_body(error: ServiceError, request_id: str) -> dict[str, Any]:
    """Return OpenAI's error object, the field at fault by its name in this API."""
    body: Any = error.body(request_id)
    field, dot, rest = (error.param or "").partition(".")
    body["error"]["param"] = AS_RESPONSE.get(field, field) + dot + rest if error.param is not None else None
    return body


ENDPOINT = ApiEndpoint(
    path="/v1/responses",
    name="responses",
    operation="create_response",
    summary="Answer items of a conversation",
    description=(
        "Answer a text or the items of a conversation, whole or as a stream of events. The response is stored unless "
        "``store`` is false."
    ),
    has_memory=True,
    body_type=ResponsesRequest,
    check=check_response,
    translate=as_chat,
    writer=ResponsesWriter,
    errors=ErrorShape(body=_error_body, schema=Error),
    field_names=AS_RESPONSE,
    tells_unread=False,  # items come back with what the API said of them: ids, states
    is_for_batches=True,
    route_field="input",
    route_signs=SIGNS,
)

COMPACT_ENDPOINT = ApiEndpoint(
    path="/v1/responses/compact",
    name="responses.compact",
    operation="compact_response",
    summary="Make a conversation shorter",
    description=(
        "Have a model sum up a conversation. What users said comes back, and a ``compaction`` item, which stands for "
        "the rest in the ``input`` of a response."
    ),
    has_memory=True,
    body_type=CompactRequest,
    check=check_compact,
    translate=as_compaction,
    writer=CompactionWriter,
    errors=ENDPOINT.errors,
    field_names=AS_RESPONSE,
    tells_unread=False,
    is_for_batches=False,
    route_field="input",
)
