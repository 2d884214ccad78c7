# The tools of a response as a chat has them, where there are only functions: a custom tool is a function of one text,
# and a namespace is the beginning of its functions' names. What a model calls is told by the tool's own name again.

from __future__ import annotations

from zlib import crc32

import msgspec
from msgspec import Struct

from protocol.chat import Function, HostedTool, Tool
from protocol.messages import MOST_SEARCHES, UNSEEN_SCHEMA
from protocol.responses import (
    HOSTED,
    SEARCH_DATE,
    GrammarFormat,
    McpChoice,
    ResponsesRequest,
    ResponsesTool,
    ToolChoice,
)

LONGEST_NAME = 64  # characters of a function's name, at every maker's
INPUT = "input"  # the one parameter of a custom tool
CUSTOM = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


class OfferedTool(Struct, frozen=True):
    """A tool that a model may call: by which function, and whose it is."""

    called: str
    tool: ResponsesTool
    namespace: str | None = None
    told_before: str | None = None  # of the namespace, with its first tool

    @property
    def is_custom(self) -> bool:
        """Whether it takes a text, and no arguments."""
        return self.tool.type == "custom"


def offered_tools(request: ResponsesRequest) -> list[OfferedTool]:
    """Return every tool of a request, in their order."""
    offered: list[OfferedTool] = []
    for tool in request.tools or ():
        if tool.type != "namespace":
            offered.append(OfferedTool(_name_of(tool), tool))
            continue
        for place, inner in enumerate(tool.tools or ()):
            called = function_name(tool.name, inner.name or "")
            offered.append(OfferedTool(called, inner, tool.name, None if place else tool.description))
    return offered


def _name_of(tool: ResponsesTool) -> str:
    """Return by which name a tool is told from others: of what the upstream runs there is one of each kind, but for
    servers. Dates of searches are no part of it: a choice names a search without one."""
    if tool.type == "mcp":
        return _server(tool.server_label or "")
    return tool.type.removesuffix(SEARCH_DATE) if tool.is_hosted else tool.name or tool.type


def chosen_name(choice: ToolChoice) -> str:
    """Return by which function a model calls the tool that a choice is of."""
    if isinstance(choice, McpChoice):
        return _server(choice.server_label)
    return str(getattr(choice, "name", choice.__struct_config__.tag))


def _server(label: str) -> str:
    return f"mcp:{label}"


def function_name(namespace: str | None, name: str) -> str:
    """Return by which function a model calls the tool of that name."""
    if namespace is None:
        return name
    joined = f"{namespace.rstrip('_')}__{name}"
    return joined if len(joined) <= LONGEST_NAME else f"{joined[: LONGEST_NAME - 9]}_{crc32(joined.encode()):08x}"


def as_function(offered: OfferedTool, most_calls: int = MOST_SEARCHES) -> Tool:
    """Return the function that stands for a tool; of one that the upstream runs, with which bound it is told."""
    tool, words = offered.tool, [offered.told_before, offered.tool.description]
    if tool.is_hosted:
        return HostedTool(Function(offered.called, None, UNSEEN_SCHEMA), most=most_calls, unit=HOSTED[tool.type])
    if isinstance(tool.format, GrammarFormat):
        words.append(f"The input must follow this {tool.format.syntax} grammar:\n{tool.format.definition}")
    described = "\n\n".join(filter(None, words)) or None
    if offered.is_custom:
        return Tool(Function(offered.called, described, CUSTOM))
    return Tool(Function(offered.called, described, tool.parameters, tool.strict))


def as_arguments(text: str) -> str:
    """Return the arguments of the function that stands for a custom tool, called with ``text``."""
    return msgspec.json.encode({INPUT: text}).decode()


def as_input(arguments: str) -> str:
    """Return the text with which a custom tool is called; a model may have written something else than arguments."""
    try:
        return _decoder.decode(arguments).input
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return arguments


class _Input(Struct):
    input: str


_decoder = msgspec.json.Decoder(_Input)
