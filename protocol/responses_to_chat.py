# A request for a response, told as a chat completion, which is what the rest of the gateway understands.

from __future__ import annotations

import base64
import binascii
import re
from functools import partial
from typing import Literal

import msgspec
from msgspec.structs import replace

from protocol.chat import (
    PDF,
    AudioPart,
    ChatRequest,
    ContentPart,
    FilePart,
    FunctionCall,
    ImagePart,
    ImageUrl,
    ItemMessage,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    NamedFunction,
    NamedTool,
    PdfFile,
    RedactedThinkingBlock,
    RefusalPart,
    TextFormat,
    TextPart,
    ThinkingBlock,
    ToolCall,
)
from protocol.errors import BadRequest, invalid_param
from protocol.messages import MOST_SEARCHES
from protocol.response_tools import (
    OfferedTool,
    as_arguments,
    as_function,
    chosen_name,
    function_name,
    offered_tools,
)
from protocol.responses import (
    OF_HOSTED,
    OF_TOOL_SEARCH,
    AllowedTools,
    CodeChoice,
    CustomChoice,
    FileSearchChoice,
    FunctionChoice,
    InputAudio,
    InputFile,
    InputImage,
    InputItem,
    InputText,
    ItemContent,
    McpChoice,
    OutputRefusal,
    OutputText,
    PictureChoice,
    ReasoningConfig,
    ResponsesRequest,
    SchemaFormat,
    SearchChoice,
    TextConfig,
    ToolChoice,
    upstreams_id,
)

SEAL = "tollgate1."  # begins the encrypted_content of reasoning that a model here takes back
PICTURE = re.compile(r"iVBORw0KGgo|/9j/|R0lGOD|UklGR")  # how one begins in base64
LOGPROBS, SEALED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"

Thought = ThinkingBlock | RedactedThinkingBlock


def to_chat(request: ResponsesRequest, before: tuple[InputItem, ...] = ()) -> ChatRequest:
    """Return the same request as a chat completion, after the items of the turns ``before``. What it only refers to is
    left out. Raises BadRequest for items that lack what their type needs."""
    text, reasoning = request.text or TextConfig(), request.reasoning or ReasoningConfig()
    instructions = (Message("system", request.instructions),) if request.instructions else ()
    tools = _offered(request)
    most = MOST_SEARCHES if request.max_tool_calls is None else request.max_tool_calls
    most = 0 if request.tool_choice == "none" else most
    wants_scores = bool(request.top_logprobs) or LOGPROBS in (request.include or ())
    return ChatRequest(
        model=request.model,
        messages=(*instructions, *_messages(before, request.input)),
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        stream=request.stream,
        tools=tuple(map(partial(as_function, most_calls=most), tools)) or None,
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls if tools else None,
        response_format=_format(text.format),
        logprobs=True if wants_scores else None,
        top_logprobs=request.top_logprobs or None,
        reasoning_effort="xhigh" if reasoning.effort == "max" else reasoning.effort,
        verbosity=text.verbosity,
        user=request.user,
        safety_identifier=request.safety_identifier,
        prompt_cache_key=request.prompt_cache_key,
        metadata=request.metadata,
    )


def _messages(before: tuple[InputItem, ...], given: str | tuple[InputItem, ...]) -> tuple[Message, ...]:
    if isinstance(given, str):
        if not before:
            return (Message("user", given),)
        given = (InputItem(role="user", content=given),)
    turns = _Turns()
    for item in before:
        turns.add(item, "previous_response_id")
    for place, item in enumerate(given):
        turns.add(item, f"input[{place}]")
    return turns.all()


class _Turns:
    """Puts items together as messages: what a model thought, said and called is one, and so is each output."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        # Of the assistant's message that is not whole yet.
        self._thoughts: list[Thought] = []
        self._words: list[ContentPart] = []
        self._calls: list[ToolCall] = []
        self._shown: list[ContentPart] = []  # what outputs show, which a message of the user's has after all of them

    def all(self) -> tuple[Message, ...]:
        """Return the messages of all items."""
        self._end()
        self._show()
        return tuple(self._messages)

    def add(self, item: InputItem, where: str) -> None:
        """Take in the next item. Raises BadRequest."""
        if item.type == "item_reference" or (item.type == "compaction" and not is_compacted_elsewhere(item)):
            return
        if item.type in ("function_call_output", "custom_tool_call_output"):
            self._end()
            self._add_output(item, where)
            return
        self._show()
        if item.type == "reasoning":
            if self._words and not self._calls:
                self._end()
            self._thoughts += thoughts_of(item, where)
            self._messages += _for_its_own_api(item)
        elif item.type in ("compaction", *OF_HOSTED, *OF_TOOL_SEARCH):
            _check_own(item, where)
            self._messages += _for_its_own_api(item)
        elif item.type in ("function_call", "custom_tool_call"):
            self._calls.append(_call(item, where))
        elif item.role == "assistant":
            if self._words and not self._calls:
                self._end()
            self._words += _parts(item.content, f"{where}.content", is_said=True)
        else:
            self._end()
            self._add_told(item, where)

    def _add_told(self, item: InputItem, where: str) -> None:
        if item.role is None:
            raise _missing(f"{where}.role")
        if item.content is None:
            raise _missing(f"{where}.content")
        content = item.content if isinstance(item.content, str) else _parts(item.content, f"{where}.content")
        self._messages.append(Message(item.role, content))

    def _add_output(self, item: InputItem, where: str) -> None:
        if item.call_id is None:
            raise _missing(f"{where}.call_id")
        if item.output is None:
            raise _missing(f"{where}.output")
        if isinstance(item.output, str):
            self._messages.append(Message("tool", item.output, tool_call_id=item.call_id))
            return
        parts = _parts(item.output, f"{where}.output")
        words = tuple(part for part in parts if isinstance(part, TextPart))
        self._messages.append(Message("tool", words or "", tool_call_id=item.call_id))
        self._shown += [part for part in parts if isinstance(part, ImagePart | FilePart | AudioPart)]

    def _show(self) -> None:
        if self._shown:
            self._messages.append(Message("user", tuple(self._shown)))
            self._shown = []

    def _end(self) -> None:
        """End the assistant's message; what it thought and never said is left out with it."""
        if self._words or self._calls:
            only = self._words[0] if len(self._words) == 1 else None
            content = only.text if isinstance(only, TextPart) else tuple(self._words) or None
            self._messages.append(
                Message(
                    "assistant",
                    content,
                    tool_calls=tuple(self._calls) or None,
                    thinking_blocks=tuple(self._thoughts) or None,
                )
            )
        self._thoughts, self._words, self._calls = [], [], []


def _parts(content: ItemContent, where: str, *, is_said: bool = False) -> tuple[ContentPart, ...]:
    """Return content as parts of a message; only a model's own (``is_said``) may hold refusals, and no images."""
    if isinstance(content, str):
        return (TextPart(content),)
    parts: list[ContentPart] = []
    for place, part in enumerate(content or ()):
        match part:
            case InputText(text) | OutputText(text):
                parts.append(TextPart(text))
            case OutputRefusal(refusal) if is_said:
                parts.append(RefusalPart(refusal))
            case InputImage(image_url=url, file_id=None, detail=detail) if url is not None and not is_said:
                parts.append(ImagePart(ImageUrl(url, detail)))
            case InputImage() if not is_said:
                words = "No files are kept for responses. Send an https address or a data URL in 'image_url'."
                raise invalid_param(f"{where}[{place}].image_url", words)
            case InputFile() if not is_said:
                parts.append(FilePart(PdfFile(_pdf(part, f"{where}[{place}]"), part.filename)))
            case InputAudio(recording) if not is_said:
                parts.append(AudioPart(recording))
            case _:
                kind = type(part).__struct_config__.tag
                raise invalid_param(f"{where}[{place}].type", f"A part of type '{kind}' has no place in this item.")
    return tuple(parts)


def _check_own(item: InputItem, where: str) -> None:
    """Refuse an item with a tool that the upstream would run, as those are offered in ``tools``, where they are priced;
    and a picture that is none. Raises BadRequest."""
    if item.result is not None and PICTURE.match(item.result) is None:
        raise invalid_param(f"{where}.result", f"'{where}.result' must be a PNG, JPEG, GIF or WebP in base64.")
    right = ("",) if item.type == "mcp_list_tools" else ("function", "custom", "namespace")
    for place, tool in enumerate(item.tools or ()):
        if tool.type not in right or any(inner.type not in ("function", "custom") for inner in tool.tools or ()):
            raise invalid_param(
                f"{where}.tools[{place}].type", "An item holds tools that the caller runs, and no other."
            )


def _for_its_own_api(item: InputItem) -> list[ItemMessage]:
    """Return what stands for an item that other APIs have no words for: a call of a tool that the upstream ran, a
    search of tools, or thinking or turns that the upstream sealed."""
    if item.type == "compaction":
        seal = RedactedThinkingBlock(item.encrypted_content or "")
        return [ItemMessage("assistant", "", thinking_blocks=(seal,), told_as="input.compaction")]
    if item.type != "reasoning":
        said = msgspec.json.encode(replace(item, id=None, result=None)).decode()
        picture = (ImagePart(ImageUrl(f"data:image/png;base64,{item.result}")),) if item.result is not None else ()
        content = (TextPart(said), *picture) if picture else said
        return [ItemMessage("assistant", content, told_as=f"input.{item.type}")]
    if not is_sealed_elsewhere(item):
        return []
    words = "\n".join([part.text for part in item.summary or ()])
    seal = RedactedThinkingBlock(item.encrypted_content or "")
    return [ItemMessage("assistant", words, thinking_blocks=(seal,), told_as="thinking_blocks")]


def is_sealed_elsewhere(item: InputItem) -> bool:
    """Whether an item is thinking that an upstream of this same API sealed, and takes back."""
    sealed = item.encrypted_content or SEAL
    return item.type == "reasoning" and not sealed.startswith(SEAL)


def is_compacted_elsewhere(item: InputItem) -> bool:
    """Whether an item stands for turns that an upstream of this same API compacted, and reads again."""
    sealed = item.encrypted_content or SEAL
    return item.type == "compaction" and not sealed.startswith(SEAL)


def without_compacted(before: tuple[InputItem, ...], own: tuple[InputItem, ...]) -> tuple[InputItem, ...]:
    """Return the items of the turns before ``own`` without those that an upstream compacted while it answered: the item
    that it gave then is all that it needs of them."""
    if any(map(_is_of_an_answer, own)):
        return ()
    made = [place for place, item in enumerate(before) if _is_of_an_answer(item)]
    return before[made[-1] :] if made else before


def _is_of_an_answer(item: InputItem) -> bool:
    """Whether an upstream compacted the turns before in an answer that was given here."""
    return is_compacted_elsewhere(item) and upstreams_id(item.id) is not None


def _pdf(part: InputFile, where: str) -> str:
    """Return the URL of a file: what another kind comes to in tokens is not known."""
    if part.file_id is None and part.file_url is not None:
        return part.file_url
    if part.file_id is None and (part.file_data or "").startswith(PDF):
        return part.file_data or ""
    words = f"No files are kept for responses. Send a PDF's https address in 'file_url', or '{PDF}…' in 'file_data'."
    raise invalid_param(f"{where}.file_data", words)


def _call(item: InputItem, where: str) -> ToolCall:
    is_custom = item.type == "custom_tool_call"
    given = item.input if is_custom else item.arguments
    if item.call_id is None or item.name is None or given is None:
        said = {"call_id": item.call_id, "name": item.name, "input" if is_custom else "arguments": given}
        raise _missing(f"{where}.{next(name for name, value in said.items() if value is None)}")
    if not isinstance(given, str):
        raise invalid_param(f"{where}.arguments", f"'{where}.arguments' must be a JSON text.")
    called = function_name(item.namespace, item.name)
    return ToolCall(item.call_id, FunctionCall(called, as_arguments(given) if is_custom else given))


def thoughts_of(item: InputItem, where: str = "input") -> list[Thought]:
    """Return what a model thought, as it wants it back. Nothing of reasoning that was not sealed here: no model of
    this gateway could read it."""
    if not (item.encrypted_content or "").startswith(SEAL):
        return []
    assert item.encrypted_content is not None
    try:
        packed = base64.b64decode(item.encrypted_content.removeprefix(SEAL), validate=True)
        return [_thought_decoder.decode(packed)]
    except (binascii.Error, ValueError, msgspec.DecodeError) as exc:
        words = "The reasoning is not as it was answered. Send the item back unchanged, or leave it out."
        raise invalid_param(f"{where}.encrypted_content", words) from exc


def seal_of(thought: Thought) -> str:
    """Return the ``encrypted_content`` by which ``thoughts_of`` gives a thought back: the model's own signed block."""
    return SEAL + base64.b64encode(msgspec.json.encode(thought)).decode()


_thought_decoder: msgspec.json.Decoder[Thought] = msgspec.json.Decoder(Thought)


def _offered(request: ResponsesRequest) -> list[OfferedTool]:
    """Return the tools that the model may call."""
    tools = offered_tools(request)
    if isinstance(request.tool_choice, AllowedTools):
        allowed = {chosen_name(tool) for tool in request.tool_choice.tools}
        return [offered for offered in tools if offered.called in allowed]
    return tools


def _choice(
    choice: Literal["none", "auto", "required"] | ToolChoice | AllowedTools | None,
) -> Literal["none", "auto", "required"] | NamedTool | None:
    match choice:
        case FunctionChoice(name) | CustomChoice(name):
            return NamedTool(NamedFunction(name))
        case AllowedTools(mode):
            return mode
        case SearchChoice() | FileSearchChoice() | CodeChoice() | PictureChoice() | McpChoice():
            return "required"
    return choice


def _format(form: TextFormat | JsonObjectFormat | SchemaFormat | None) -> JsonObjectFormat | JsonSchemaFormat | None:
    match form:
        case SchemaFormat(name, schema, description, strict):
            return JsonSchemaFormat(JsonSchema(name, schema, description, strict))
        case JsonObjectFormat():
            return form.in_openais_words()
    return None


def _missing(param: str) -> BadRequest:
    words = f"Missing required parameter: '{param}'."
    return BadRequest(words, param=param, code="missing_required_parameter")
