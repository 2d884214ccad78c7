# What a request says about tools: which ones the model may call, whether it must, and the grammar that makes it.

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from gpu_backend.server.checkpoint.checkpoint import Checkpoint
from gpu_backend.server.checkpoint.tokens import TextCodec
from gpu_backend.server.checkpoint.tool_calls import CLOSE, OPEN, ToolStyle
from gpu_backend.server.requests.structured import MAX_TEXT
from gpu_backend.step.sampling_params import JSON_BLANKS, Grammar, GrammarKind
from protocol.chat import ChatRequest, NamedTool, Tool
from protocol.errors import UnsupportedParameter, invalid_param

MAX_TOOLS = 128
BLANKS = {"x-guidance": {"whitespace_pattern": JSON_BLANKS}}
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request. ``grammar`` is None where the model may also answer in text."""

    tools: tuple[Tool, ...]
    style: ToolStyle
    grammar: Grammar | None
    has_one_call: bool = False  # calls after the first are not told
    stops: tuple[str, ...] = ()  # where a reply ends that may have one call only

    @property
    def names(self) -> frozenset[str]:
        """What can be called."""
        return frozenset(tool.function.name for tool in self.tools)


def read_tools(body: ChatRequest, checkpoint: Checkpoint, answer: Grammar | None = None) -> ToolUse | None:
    """Return what may be called, None for nothing. Raises ``BadRequest``, also for a model that knows no tools.

    ``answer`` is the schema of an answer in text: it binds a reply that is no call, and no call's arguments.
    """
    if not body.tools:
        if body.tool_choice not in (None, "none", "auto"):
            raise invalid_param("tool_choice", "'tool_choice' needs 'tools' to choose from.")
        return None
    _check(body.tools)
    if body.tool_choice == "none":
        return None
    if checkpoint.tool_chat is None or checkpoint.tool_chat.tool_style is None:
        raise UnsupportedParameter(
            "This model's chat template has no tools, or none in a style that this engine reads (Hermes, Qwen, "
            "Llama 3, GPT-OSS). Leave 'tools' out, or ask another model.",
            param="tools",
        )
    style = checkpoint.tool_chat.tool_style
    if style is ToolStyle.HARMONY and body.tool_choice not in (None, "auto"):
        raise UnsupportedParameter(
            "This model thinks before it calls, so it cannot be made to. Leave 'tool_choice' out, or send 'auto'.",
            param="tool_choice",
        )
    several = body.parallel_tool_calls is not False
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        callable_ones = [tool for tool in body.tools if tool.function.name == name]
        if not callable_ones:
            raise invalid_param("tool_choice", f"'tool_choice' names {name[:64]!r}, which is not among 'tools'.")
        grammar = _grammar(callable_ones, style, checkpoint.codec, several=False)
    elif body.tool_choice == "required":
        grammar = _grammar(body.tools, style, checkpoint.codec, several=several)
    elif answer is not None and style is not ToolStyle.HARMONY:
        bound = _grammar(body.tools, style, checkpoint.codec, several=several, answer=answer.text)
        return ToolUse(body.tools, style, bound, not several)
    else:
        stops = () if several or style is not ToolStyle.HERMES else (CLOSE,)
        return ToolUse(body.tools, style, None, not several, stops)
    if len(grammar.text) > MAX_TEXT:
        message = (
            f"The parameters of 'tools' come to {len(grammar.text)} characters; what a call must follow has at most"
        )
        raise invalid_param("tools", f"{message} {MAX_TEXT}. Leave 'tool_choice' out, or send fewer.")
    return ToolUse(body.tools, style, grammar, not several)


def _grammar(
    tools: tuple[Tool, ...] | list[Tool], style: ToolStyle, codec: TextCodec, *, several: bool, answer: str = ""
) -> Grammar:
    """Return the rules by which a reply is one call, or several, or an answer of that schema, and nothing else."""
    key = "arguments" if style is ToolStyle.HERMES else "parameters"
    rules, otherwise = [], ""
    if answer:
        rules = [f"answer: %json {json.dumps(json.loads(answer) | BLANKS, ensure_ascii=False)}"]
        otherwise = " | answer"
    for number, tool in enumerate(tools):
        # Where the model may call or not, the arguments are any object, as without a schema of the answer.
        schema = {"type": "object", **({} if answer else tool.function.parameters or {}), **BLANKS}
        if answer and style is ToolStyle.LLAMA:  # both are objects: a text would be taken for the beginning of either
            said = {"name": {"const": tool.function.name}, "parameters": schema}
            call = {"type": "object", "properties": said, "required": [*said], "additionalProperties": False}
            rules.append(f"call{number}: %json {json.dumps(call | BLANKS)}")
            continue
        head = json.dumps('{"name": ' + json.dumps(tool.function.name) + f', "{key}": ')
        rules.append(f'call{number}: {head} %json {json.dumps(schema)} "}}"')
    body = " | ".join(f"call{number}" for number in range(len(tools)))
    if style is ToolStyle.LLAMA:  # its templates take one call a turn
        return Grammar(GrammarKind.LARK, "\n".join(["start: " + body + otherwise, *rules]))
    opener = f'{OPEN} "\\n"' if codec.is_special(OPEN) else json.dumps(OPEN + "\n")
    closer = f'"\\n" {CLOSE}' if codec.is_special(CLOSE) else json.dumps("\n" + CLOSE)
    start = 'start: wrapped ("\\n" wrapped)*' if several else "start: wrapped"
    return Grammar(GrammarKind.LARK, "\n".join([start + otherwise, f"wrapped: {opener} ({body}) {closer}", *rules]))


def _check(tools: tuple[Tool, ...]) -> None:
    if len(tools) > MAX_TOOLS:
        raise invalid_param("tools", f"'tools' holds {len(tools)} tools; it holds at most {MAX_TOOLS}.")
    names = [tool.function.name for tool in tools]
    for place, name in enumerate(names):
        field = f"tools[{place}].function.name"
        if not _NAME.fullmatch(name):
            raise invalid_param(field, f"'{field}' is {name[:80]!r}; it has 1 to 64 letters, digits, '_', '.' and '-'.")
        if name in names[:place]:
            raise invalid_param(field, f"'{field}' is {name!r}, as an earlier tool's.")
