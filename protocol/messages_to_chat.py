# A request for a message, told as a chat completion, which is what the rest of the gateway understands.

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec.structs import replace

from protocol.chat import (
    ChatRequest,
    ContentPart,
    FilePart,
    Function,
    FunctionCall,
    HostedTool,
    ImagePart,
    ImageUrl,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    NamedFunction,
    NamedTool,
    PdfFile,
    RedactedThinkingBlock,
    TextPart,
    ThinkingBlock,
    Tool,
    ToolCall,
)
from protocol.errors import BadRequest
from protocol.messages import (
    MOST_SEARCHES,
    RUN_UPSTREAM,
    UNSEEN_SCHEMA,
    AnyChoice,
    AutoChoice,
    Base64Source,
    Block,
    ContentSource,
    DocumentBlock,
    Effort,
    ImageBlock,
    MessagesRequest,
    MessageTool,
    NoChoice,
    OutputConfig,
    PdfSource,
    PlainSource,
    ResultBlock,
    SearchResultBlock,
    ServerBlock,
    TextBlock,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    UrlSource,
)

AS_REASONING: dict[Effort, Literal["low", "medium", "high", "xhigh"]] = {
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "xhigh",
    "max": "xhigh",
}


# What the upstream writes around texts that may be cited, which it parts into sentences: they are counted with the
# prompt, as dashes, and sent to none.
CITING_TOKENS = 512
SENTENCE_TOKENS = 12
SENTENCE_ENDS = re.compile(r"[.!?\n\u3002\uff01\uff1f]")


def to_chat(request: MessagesRequest) -> ChatRequest:
    """Return the same request as a chat completion. Raises BadRequest for turns that no dialect could carry."""
    config = request.output_config or OutputConfig()
    form = config.format
    return ChatRequest(
        model=request.model,
        messages=(*_instructions(request.system), *_messages(request.messages)),
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        stop=request.stop_sequences or None,
        stream=request.stream,
        tools=_tools(request.tools) if request.tools else None,
        tool_choice=_choice(request.tool_choice) if request.tools else None,
        parallel_tool_calls=False if getattr(request.tool_choice, "disable_parallel_tool_use", None) else None,
        response_format=JsonSchemaFormat(JsonSchema("answer", form.schema, strict=True)) if form else None,
        reasoning_effort=_effort(request),
        user=request.metadata.user_id if request.metadata else None,
    )


def _instructions(system: str | tuple[TextBlock, ...] | None) -> tuple[Message, ...]:
    words = system if isinstance(system, str) or system is None else _told(system, "system")
    return (Message("system", words),) if words else ()


def _messages(turns: tuple[Turn, ...]) -> list[Message]:
    messages: list[Message] = []
    for place, turn in enumerate(turns):
        blocks: tuple[Block, ...] = (TextBlock(turn.content),) if isinstance(turn.content, str) else turn.content
        if turn.role == "assistant":
            messages.append(_reply(blocks, f"messages[{place}]"))
        elif turn.role == "system":
            messages.append(Message("system", _told(blocks, f"messages[{place}]")))
        else:
            messages += _said(blocks, f"messages[{place}]")
    return messages


def _reply(blocks: tuple[Block, ...], where: str) -> Message:
    """Return an assistant's turn: one message with its words and its calls."""
    words, calls, thought = [], [], []
    for block in blocks:
        match block:
            case TextBlock(text):
                words.append(text)
            case ToolUseBlock(ident, name, arguments):
                calls.append(ToolCall(ident, FunctionCall(name, msgspec.json.encode(arguments).decode())))
            case ThinkingBlock() | RedactedThinkingBlock():
                thought.append(block)
            case _ if isinstance(block, ServerBlock):
                words.append(msgspec.json.encode(block).decode())  # counted and looked through; no other model is told
            case _:
                raise _misplaced(block, where)
    text = "".join(words)
    return Message(
        "assistant",
        text if text or not calls else None,
        tool_calls=tuple(calls) or None,
        thinking_blocks=tuple(thought) or None,
    )


def _told(blocks: tuple[Block, ...], where: str) -> str:
    """Return the words of instructions that stand among the turns."""
    strange = next((block for block in blocks if not isinstance(block, TextBlock)), None)
    if strange is not None:
        raise _misplaced(strange, where)
    return "\n\n".join(block.text for block in blocks if isinstance(block, TextBlock))


def _said(blocks: tuple[Block, ...], where: str) -> list[Message]:
    """Return a user's turn: first a message for each result of a tool, then one with everything else."""
    results: list[Message] = []
    parts: list[ContentPart] = []
    for block in blocks:
        match block:
            case TextBlock() | ImageBlock() | DocumentBlock() | SearchResultBlock():
                parts += _parts(block)
            case ToolResultBlock(ident, content):
                inner = (TextBlock(content),) if isinstance(content, str) else content or ()
                told = [part for each in inner for part in _parts(each)]
                words = "".join(part.text for part in told if isinstance(part, TextPart))
                results.append(Message("tool", f"Error: {words}" if block.is_error else words, tool_call_id=ident))
                parts += [part for part in told if isinstance(part, ImagePart | FilePart)]
            case _:
                raise _misplaced(block, where)
    if len(parts) == 1 and isinstance(parts[0], TextPart):
        return [*results, Message("user", parts[0].text)]
    return [*results, Message("user", tuple(parts))] if parts or not results else results


def _parts(block: ResultBlock) -> list[TextPart | ImagePart | FilePart]:
    """Return what a block shows. Search results, and documents to be cited, go to Anthropic's models alone, and in
    their own form: here they are what is counted, looked through and held."""
    match block:
        case TextBlock(text):
            return [TextPart(text)]
        case ImageBlock(source):
            return [_image(source)]
        case DocumentBlock(source):
            shown = [*_texts(block.title, block.context), *_shown(source, block.title)]
        case SearchResultBlock():
            shown = [*_texts(block.title, block.source), *(part for each in block.content for part in _parts(each))]
    if block.citations is not None and block.citations.enabled:
        ends = sum(len(SENTENCE_ENDS.findall(part.text)) for part in shown if isinstance(part, TextPart))
        shown.append(TextPart("-" * (CITING_TOKENS + SENTENCE_TOKENS * ends)))
    return shown


def _shown(
    source: PdfSource | PlainSource | ContentSource | UrlSource, title: str | None
) -> list[TextPart | ImagePart | FilePart]:
    match source:
        case PdfSource(kind, data):
            return [FilePart(PdfFile(f"data:{kind};base64,{data}", title))]
        case UrlSource(url):
            return [FilePart(PdfFile(url, title))]
        case PlainSource(data=text):
            return [TextPart(text)]
        case ContentSource(content):
            blocks = (TextBlock(content),) if isinstance(content, str) else content
            return [part for each in blocks for part in _parts(each)]


def _texts(*texts: str | None) -> list[TextPart]:
    return [TextPart(f"{text}\n") for text in texts if text]


def _image(source: Base64Source | UrlSource) -> ImagePart:
    if isinstance(source, UrlSource):
        return ImagePart(ImageUrl(source.url))
    return ImagePart(ImageUrl(f"data:{source.media_type};base64,{source.data}"))


def _misplaced(block: Block, where: str) -> BadRequest:
    kind = type(block).__struct_config__.tag
    return BadRequest(f"A block of type '{kind}' has no place in a turn of that role.", param=where)


def _tools(tools: Iterable[MessageTool]) -> tuple[Tool, ...]:
    """Return tools as functions. Each that the upstream runs has a bound of its own, and the model reads its prompt
    anew after the calls of them all; after ``MOST_SEARCHES`` the turn is paused, unless one is asked for more."""
    told = tuple(map(_tool, tools))
    bounds = [tool.most for tool in told if isinstance(tool, HostedTool)]
    if len(bounds) < 2:
        return told
    calls = max(*bounds, min(sum(bounds), MOST_SEARCHES))
    return tuple([replace(tool, calls=calls) if isinstance(tool, HostedTool) else tool for tool in told])


def _tool(tool: MessageTool) -> Tool:
    if (hosted := RUN_UPSTREAM.get(tool.type or "")) is not None:
        most = MOST_SEARCHES if tool.max_uses is None else tool.max_uses
        unseen = Function(tool.name, None, UNSEEN_SCHEMA)
        return HostedTool(unseen, most=most, unit=hosted[1], found=tool.max_content_tokens)
    schema = UNSEEN_SCHEMA if tool.is_anthropics else tool.input_schema
    if tool.input_examples:
        schema = {**(schema or {}), "examples": list(tool.input_examples)}
    return Tool(Function(tool.name, tool.description, schema, tool.strict))


def _choice(
    choice: AutoChoice | AnyChoice | ToolChoice | NoChoice | None,
) -> Literal["none", "auto", "required"] | NamedTool | None:
    match choice:
        case AnyChoice():
            return "required"
        case NoChoice():
            return "none"
        case ToolChoice(name):
            return NamedTool(NamedFunction(name))
        case AutoChoice():
            return "auto"
    return None


def _effort(request: MessagesRequest) -> Literal["none", "low", "medium", "high", "xhigh"] | None:
    effort = request.output_config.effort if request.output_config else None
    match request.thinking:
        case ThinkingDisabled():
            return "none"
        case ThinkingEnabled(budget):  # about as the providers' own tables have it
            return "low" if budget <= 2048 else "medium" if budget <= 8192 else "high"
        case _:
            return AS_REASONING[effort] if effort else None
