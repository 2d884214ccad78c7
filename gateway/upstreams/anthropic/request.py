# A chat completion as Anthropic's Messages API has it. Pure: a ChatRequest in, a body out, and the names of what had to
# be left out of it. What changes the meaning of a request is refused by name; nothing is dropped in silence.

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from gateway.model_facts.claude_models import rules_of
from gateway.upstreams.anthropic.fit import fit
from gateway.upstreams.anthropic.json_answer import ask_for_json
from gateway.upstreams.anthropic.names import make_names_safe
from gateway.upstreams.anthropic.schema import binding_schema, is_open
from gateway.upstreams.wire.base import Asking
from gateway.upstreams.wire.errors import UpstreamRefused
from gateway.upstreams.wire.short_ids import short_id
from gateway.upstreams.wire.signatures import is_claudes
from gateway.upstreams.wire.unsayable import Unsayable, arguments_of, is_marked, openais_wishes, refuse_openais_own
from protocol.chat import (
    PDF,
    AudioPart,
    ChatRequest,
    ContentPart,
    FilePart,
    ImagePart,
    Message,
    NamedTool,
    RefusalPart,
    TextPart,
    ThinkingBlock,
    Tool,
    ToolCall,
)
from protocol.messages import (
    CALLERS_BETAS,
    MOST_SEARCHES,
    WEB_FETCH,
    WEB_SEARCH,
    MessagesRequest,
    MessageTool,
    TextBlock,
    ToolResultBlock,
    Turn,
)
from protocol.messages import Block as NativeBlock
from router.prompt_size.pictures import images_of

Block = dict[str, Any]

# A cache write costs a quarter more than plain input and a read a tenth of it (Anthropic, "Prompt caching"): a prefix
# is marked only where it is long enough to be cached at all, and stable enough to be read again.
CACHED_FROM = 8192  # bytes; the shortest prefix that is cached has 1,024 to 4,096 tokens, by model
CACHE = {"type": "ephemeral"}
DATA_URL = re.compile(r"data:(image/(?:jpeg|png|gif|webp));base64,(.+)", re.DOTALL | re.IGNORECASE)
COUNTED = frozenset(
    {"model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "context_management"}
)
ANY_LIMIT = 2**31  # of output, where none is generated: no budget of thinking is too large
LONGEST_USER_ID = 256  # characters
LONGEST_TITLE = 500  # characters of a document's
AS_CHAT = {"thinking": "reasoning_effort", "output_config.effort": "reasoning_effort"}  # names in OpenAI's dialect
FIRST_WORDS = "."  # a conversation begins with the user; what stands for one that begins with the assistant

NOTHING_MORE: Mapping[str, Any] = {}
CLAUDES_FIELDS = frozenset({"top_k"})  # that a chat lacks, and any caller may say
Content = Any  # of a turn, of instructions or of a tool's result, in the caller's blocks or as a text
Written = tuple[Block, list[str]]  # a body, and the caller's names of the fields that it leaves out


def message_body(
    request: ChatRequest, model: str, max_output: int, *, streams: bool, extra: Mapping[str, Any] = NOTHING_MORE
) -> Written:
    """Return the body of POST /v1/messages, with fields that are no chat's. Raises Unsayable, or UpstreamRefused for
    what no upstream would take."""
    refuse_openais_own(request)
    body: Block = {
        "model": model,
        "max_tokens": request.output_limit if request.output_limit is not None else max_output,
        "messages": _turns(request.messages),
    }
    if streams:
        body["stream"] = True
    if system := _system(request.messages):
        body["system"] = system
    if request.tools:
        body["tools"] = [_tool(tool) for tool in request.tools]
        body |= _tool_choice(request)
    if request.temperature is not None:
        body["temperature"] = min(1.0, request.temperature)  # its scale ends at 1
    if request.top_p is not None and request.top_p < 1:
        body["top_p"] = request.top_p
    if stops := _stop_sequences(request):
        body["stop_sequences"] = stops
    if who := request.safety_identifier or request.user:
        body["metadata"] = {"user_id": short_id(who, LONGEST_USER_ID)}
    body |= _thinking(request) | dict(extra)
    rules = rules_of(model)
    ask_for_json(body, request, rules)
    make_names_safe(body)
    dropped = [*_left_out(request), *(AS_CHAT.get(name, name) for name in fit(body, rules))]
    if not any(is_marked(message) for message in request.messages):
        _mark_stable_prefixes(body)
    return body, dropped


def native_body(
    asked: MessagesRequest, request: ChatRequest, model: str, *, streams: bool, extra: Mapping[str, Any] = NOTHING_MORE
) -> Written:
    """Return the body for a request that came in this very dialect: as it was decoded, with thinking and cache marks.

    ``request`` is the same as a chat, whose output limit may have been lowered to what the model can do.
    """
    limit = asked.max_tokens if request.output_limit is None else request.output_limit
    turns = tuple(turn for turn in map(_told_again, asked.messages) if turn.content)
    system = _kept(asked.system) or None
    tools = tuple(map(_bounded, asked.tools)) if asked.tools is not None else None
    mine = replace(
        asked, model=model, max_tokens=limit, stream=streams or None, messages=turns, system=system, tools=tools
    )
    body: Block = msgspec.to_builtins(mine) | dict(extra)
    body.pop("anthropic_beta", None)  # a header of this API's
    make_names_safe(body)
    left_out = (name for name in asked.anthropic_beta or () if name not in CALLERS_BETAS)
    return body, [*fit(body, rules_of(model)), *(f"anthropic-beta.{name}" for name in left_out)]


def body_of(asking: Asking, request: ChatRequest, *, streams: bool) -> Written:
    """Return the body of what is asked, in whichever dialect it came; Bedrock's is made of it, too."""
    model = asking.target.model
    if asking.native is not None:
        return native_body(asking.native, request, model.upstream_model, streams=streams, extra=asking.extra)
    return message_body(request, model.upstream_model, model.usual_output, streams=streams, extra=asking.extra)


def _bounded(tool: MessageTool) -> MessageTool:
    """Return a tool; a search, or one that fetches, with the bound that it is held by."""
    if tool.type in (WEB_SEARCH, WEB_FETCH) and tool.max_uses is None:
        return replace(tool, max_uses=MOST_SEARCHES)
    return tool


def is_wish(value: Any) -> bool:
    """Whether a value of ``CLAUDES_FIELDS`` is one: elsewhere -1 and 0 stand for none."""
    return type(value) is int and value > 0


def count_body(asking: Asking) -> Block:
    """Return the body of POST /v1/messages/count_tokens: what makes the prompt, and nothing else of a request."""
    request, native = asking.request, asking.native
    assert isinstance(request, ChatRequest)
    unlimited = replace(request, max_tokens=ANY_LIMIT, max_completion_tokens=None)
    native = None if native is None else replace(native, max_tokens=ANY_LIMIT)
    body, _ = body_of(replace(asking, native=native), unlimited, streams=False)
    return {name: value for name, value in body.items() if name in COUNTED}


def _told_again(turn: Turn) -> Turn:
    """Return a turn without what would be refused: the thinking of another maker's models, which is not signed, and
    blank text."""
    return replace(turn, content=_kept(turn.content) or ())


def _kept(content: Content) -> Content:
    """Return content without such blocks, also those inside of a tool's result; ``None`` for blank text."""
    if isinstance(content, tuple):
        return tuple(map(_result_told_again, filter(_is_taken, content)))
    return content if content is not None and content.strip() else None


def _is_taken(block: NativeBlock) -> bool:
    match block:
        case ThinkingBlock():
            return is_claudes(block)
        case TextBlock(text):
            return bool(text.strip())
    return True


def _result_told_again(block: NativeBlock) -> NativeBlock:
    if isinstance(block, ToolResultBlock) and block.content != (kept := _kept(block.content) or None):
        return replace(block, content=kept)
    return block


def _left_out(request: ChatRequest) -> Iterator[str]:
    """Yield the fields that this dialect lacks and that say nothing about what the answer is to be."""
    tools = request.tools or ()
    asked = {"seed": request.seed is not None} | openais_wishes(request)
    asked |= {
        "messages.content.image_url.detail": any(image.detail not in (None, "auto") for image in images_of(request)),
        "tools.function.strict": any(tool.function.strict and is_open(tool.function.parameters) for tool in tools),
    }
    yield from (name for name, is_asked in asked.items() if is_asked)


def _system(messages: Iterable[Message]) -> list[Block]:
    """Return the instructions, from wherever they stand, as blocks at the top: the only place that this dialect has."""
    told = (message for message in messages if message.role in ("system", "developer"))
    return [block for message in told for block in _content(message)]


def _turns(messages: Iterable[Message]) -> list[Block]:
    """Return the conversation as turns that alternate, beginning with the user's; neighbours of one role are merged."""
    turns: list[Block] = []
    for message in messages:
        if message.role in ("system", "developer"):
            continue
        role = "assistant" if message.role == "assistant" else "user"
        blocks = _blocks(message)
        if not blocks:
            continue
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    for turn in turns:
        if turn["role"] == "user":
            turn["content"].sort(key=_is_no_result)  # the calls before it are answered first
    if not turns or turns[0]["role"] == "assistant":
        turns.insert(0, {"role": "user", "content": [{"type": "text", "text": FIRST_WORDS}]})
    if turns[-1]["role"] == "assistant":
        _strip_end(turns[-1]["content"])
        if not turns[-1]["content"]:
            turns.pop()
    return turns


def _blocks(message: Message) -> list[Block]:
    match message.role:
        case "tool":
            result: Block = {"type": "tool_result", "tool_use_id": message.tool_call_id}
            content = list(_content(message))
            return [result | {"content": content} if content else result]
        case "assistant":
            said = [*_content(message), *map(_tool_use, message.tool_calls or ())]
            return [*_thoughts(message), *said] if said else []  # no turn is thinking alone
    return list(_content(message))


def _thoughts(message: Message) -> Iterator[Block]:
    """Yield what the model thought before it said this, verbatim; what is not signed is another maker's."""
    for block in message.thinking_blocks or ():
        if is_claudes(block):
            yield msgspec.to_builtins(block)


def _content(message: Message) -> Iterator[Block]:
    """Yield the blocks of a message's content. Blank text is left out: it would be refused."""
    parts = (TextPart(message.content),) if isinstance(message.content, str) else message.content or ()
    for part in parts:
        match part:
            case TextPart(text) | RefusalPart(text):
                if text.strip():
                    yield {"type": "text", "text": text} | _mark(part)
            case ImagePart(image):
                yield {"type": "image", "source": _image_source(image.url)} | _mark(part)
            case FilePart(file):
                title = (file.filename or "").strip()[:LONGEST_TITLE]
                named = {"title": title} if title else {}
                yield {"type": "document", "source": _pdf_source(file.url)} | named | _mark(part)
            case AudioPart():
                words = "The model that answers here hears nothing. Send what is said in words."
                raise Unsayable(words, param="messages")
    if message.refusal and message.refusal.strip():
        yield {"type": "text", "text": message.refusal}


def _mark(part: ContentPart) -> Block:
    """Return the mark that a caller set at the end of a prefix that shall be cached, if there is one."""
    control = None if isinstance(part, RefusalPart | AudioPart) else part.cache_control
    return {} if control is None else {"cache_control": msgspec.to_builtins(control)}


def _image_source(url: str) -> Block:
    """Return where an image is: inside the request, or at an address that the upstream fetches, never we."""
    if found := DATA_URL.fullmatch(url):
        return {"type": "base64", "media_type": found[1].lower(), "data": found[2]}
    if url.startswith("https://"):
        return {"type": "url", "url": url}
    raise UpstreamRefused(
        "An image is a data URL (JPEG, PNG, GIF or WebP in base64) or an https address.",
        outcome="unsayable",
        param="messages",
        code="invalid_image_url",
    )


def _pdf_source(url: str) -> Block:
    """Return where a PDF is: inside the request, or at an address that the upstream fetches."""
    if url.startswith(PDF):
        return {"type": "base64", "media_type": "application/pdf", "data": url.removeprefix(PDF)}
    return _image_source(url)


def _tool_use(call: ToolCall) -> Block:
    """Return a call that the model made earlier."""
    return {"type": "tool_use", "id": call.id, "name": call.function.name, "input": arguments_of(call)}


def _is_no_result(block: Block) -> bool:
    return block["type"] != "tool_result"


def _strip_end(blocks: list[Block]) -> None:
    """Take white space off the end of a reply that the model shall go on with: it would be refused."""
    if blocks[-1]["type"] == "text":
        blocks[-1]["text"] = blocks[-1]["text"].rstrip()
        if not blocks[-1]["text"]:
            blocks.pop()


def _tool(tool: Tool) -> Block:
    function = tool.function
    schema = {"type": "object", **function.parameters} if function.parameters else {"type": "object", "properties": {}}
    shown: Block = {"name": function.name, "input_schema": schema}
    if function.description:
        shown["description"] = function.description
    if function.strict and not is_open(schema):
        shown |= {"strict": True, "input_schema": binding_schema(shown["input_schema"])}
    return shown


def _tool_choice(request: ChatRequest) -> Block:
    match request.tool_choice:
        case NamedTool(function):
            choice: Block = {"type": "tool", "name": function.name}
        case "required":
            choice = {"type": "any"}
        case "none":
            return {"tool_choice": {"type": "none"}}
        case _:
            choice = {"type": "auto"}
    if request.parallel_tool_calls is False:
        choice["disable_parallel_tool_use"] = True
    return {"tool_choice": choice} if choice != {"type": "auto"} else {}


def _stop_sequences(request: ChatRequest) -> list[str]:
    stops = [request.stop] if isinstance(request.stop, str) else list(request.stop or ())
    if any(not stop.strip() for stop in stops):
        raise Unsayable("The model that answers here takes no 'stop' of white space alone.", param="stop")
    return stops


def _thinking(request: ChatRequest) -> Block:
    """Return how hard to think: as long as the effort says (``thinking: adaptive``); without a wish, by default."""
    match request.reasoning_effort:
        case None:
            return {}
        case "none" | "minimal":
            return {"thinking": {"type": "disabled"}}
        case effort:
            return {"thinking": {"type": "adaptive"}, "output_config": {"effort": effort}}


def mark_last_block(body: Block, mark: Block) -> None:
    """Have all of a request cached, as a mark of its own has it, by one at its last block."""
    turn = body["messages"][-1]
    *others, last = [{"type": "text", "text": said}] if isinstance(said := turn["content"], str) else said
    turn["content"] = [*others, {"cache_control": mark} | last]


def _mark_stable_prefixes(body: Block) -> None:
    """Ask for a cache of what the next request will begin with again, where the client has placed no marks.

    Tools and system, which a product sends every time; and a conversation that has already been gone on with.
    """
    instructions = body.get("system") or body.get("tools") or []
    size = sum(len(msgspec.json.encode(body.get(name, []))) for name in ("tools", "system"))
    if instructions and size >= CACHED_FROM:
        instructions[-1]["cache_control"] = CACHE
    turns = body["messages"]
    is_going_on = any(turn["role"] == "assistant" for turn in turns) and turns[-1]["role"] == "user"
    if is_going_on and size + len(msgspec.json.encode(turns)) >= CACHED_FROM:
        turns[-1]["content"][-1]["cache_control"] = CACHE
