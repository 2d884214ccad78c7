# A chat completion as Gemini's generateContent has it. Pure: a ChatRequest in, a body out, and the names of what had to
# be left out of it. What changes the meaning of a request is refused by name; nothing is dropped in silence.

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gateway.egress.urls import BadUrl, read_url
from gateway.model_facts.gemini_models import BUDGETS, EFFORTS, GeminiRules, rules_of
from gateway.upstreams.gemini.schema import gemini_schema
from gateway.upstreams.wire.errors import UpstreamRefused
from gateway.upstreams.wire.short_ids import digest_of
from gateway.upstreams.wire.signatures import geminis
from gateway.upstreams.wire.unsayable import Unsayable, arguments_of, is_marked, openais_wishes, refuse_openais_own
from protocol.chat import (
    PDF,
    AudioPart,
    ChatRequest,
    FilePart,
    ImagePart,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    NamedTool,
    RefusalPart,
    TextPart,
    Tool,
    ToolCall,
)

Block = dict[str, Any]

# Of other kinds, as films, it is not known what they come to in tokens.
IMAGE = re.compile(r"data:(image/[\w.+-]+);base64,(.+)", re.DOTALL | re.ASCII | re.IGNORECASE)
ANSWER_SHARE = 5  # of a limit, one part in so many is kept for the answer when an effort is told as a budget
FIRST_WORDS = "."  # a conversation begins with the user; what stands for one that begins with the model
SAYS_NOTHING = ("type", "$schema", "title", "description")  # words of a schema that names no value
SAFE = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.:-]{0,63}")  # names of functions
STRANGE = re.compile(r"[^a-zA-Z0-9_-]")
KEPT = 40  # characters of a name that is too long, or not safe
FETCHED = ("bmp", "png", "webp")  # endings of pictures that are fetched by their kind; others as JPEG
LONGEST_URL = 16 * 1024  # characters: signed ones are long
GOOGLES = re.compile(r"(?:^|\.)(?:(?:googleapis|google|googleusercontent|youtube|youtube-nocookie)\.com|youtu\.be)$")
MODES = {"none": "NONE", "auto": "AUTO", "required": "ANY"}
# Stands for the signature of a call that another model made, or whose client did not keep it (Google, "Thought
# signatures"): without any, the newer models refuse the conversation.
UNSIGNED = b64encode(b"skip_thought_signature_validator").decode()  # a signature is bytes, which JSON has in base64


def content_body(request: ChatRequest, model: str, max_output: int) -> tuple[Block, list[str]]:
    """Return the body of generateContent, and the names of the fields that it leaves out. Raises Unsayable, or
    UpstreamRefused for what no upstream would take."""
    refuse_openais_own(request)
    rules = rules_of(model)
    body: Block = {"contents": _contents(request.messages, rules)}
    if instructions := list(_instructions(request.messages, rules)):
        body["systemInstruction"] = {"parts": instructions}
    if request.tools:
        body["tools"] = [{"functionDeclarations": [_declaration(tool) for tool in request.tools]}]
        body["toolConfig"] = {"functionCallingConfig": _calling(request)}
    limit = request.output_limit if request.output_limit is not None else max_output
    thinking, dropped = _thinking(request, rules, limit)
    config = {
        "maxOutputTokens": limit,
        "temperature": request.temperature,
        "topP": request.top_p,
        "seed": request.seed,
        "stopSequences": [request.stop] if isinstance(request.stop, str) else list(request.stop or ()),
        "thinkingConfig": thinking,
        **_answer_form(request, rules),
    }
    body["generationConfig"] = {name: value for name, value in config.items() if value not in (None, [], {})}
    return body, [*dropped, *_left_out(request)]


def _left_out(request: ChatRequest) -> Iterator[str]:
    """Yield the fields that this API lacks and that say nothing about what the answer is to be."""
    thoughts = [message.thinking_blocks for message in request.messages]
    asked = openais_wishes(request) | {
        "user": request.user is not None,
        "safety_identifier": request.safety_identifier is not None,
        "thinking_blocks": any(blocks and geminis(blocks) is None for blocks in thoughts),
        "cache_control": any(map(is_marked, request.messages)),
    }
    yield from (name for name, is_asked in asked.items() if is_asked)


def _instructions(messages: Iterable[Message], rules: GeminiRules) -> Iterator[Block]:
    """Yield the parts of the instructions, from wherever they stand: their only place here is beside the turns."""
    for message in messages:
        if message.role in ("system", "developer"):
            yield from _parts(message, rules)


def _contents(messages: Iterable[Message], rules: GeminiRules) -> list[Block]:
    """Return the conversation as turns that alternate, beginning with the user's; neighbours of one role are merged."""
    turns: list[Block] = []
    names: dict[str, str] = {}  # of the functions that calls were made of, by the calls' ids
    for message in messages:
        if message.role in ("system", "developer"):
            continue
        names |= {call.id: call.function.name for call in message.tool_calls or ()}
        role = "model" if message.role == "assistant" else "user"
        if not (parts := _turn(message, names, rules)):
            continue
        if turns and turns[-1]["role"] == role:
            turns[-1]["parts"] += parts
        else:
            turns.append({"role": role, "parts": parts})
    for turn in turns:
        turn["parts"].sort(key=_is_no_result)  # the calls before it are answered first
    if not turns or turns[0]["role"] == "model":
        turns.insert(0, {"role": "user", "parts": [{"text": FIRST_WORDS}]})
    return turns


def _turn(message: Message, names: Mapping[str, str], rules: GeminiRules) -> list[Block]:
    match message.role:
        case "tool":
            ident = message.tool_call_id or ""
            answer: Block = {"name": safe_name(names.get(ident) or message.name or "tool")}
            answer |= {"id": ident, "response": {"output": message.text()}}
            pictures = [part for part in _parts(message, rules) if "text" not in part]
            return [{"functionResponse": answer}, *pictures]
        case "assistant":
            calls = [_call(call) for call in message.tool_calls or ()]
            if calls and (signature := geminis(message.thinking_blocks or ()) or (rules.wants_signatures and UNSIGNED)):
                calls[0]["thoughtSignature"] = signature  # of calls made at once, the first has it for all
            return [*_parts(message, rules), *calls]
    return list(_parts(message, rules))


def _parts(message: Message, rules: GeminiRules) -> Iterator[Block]:
    """Yield the parts of a message's content. An empty text is left out: it would be refused."""
    parts = (TextPart(message.content),) if isinstance(message.content, str) else message.content or ()
    for part in parts:
        match part:
            case TextPart(text) | RefusalPart(text):
                if text:
                    yield {"text": text}
            case ImagePart(image):
                yield _image(image.url, rules)
            case FilePart(file):
                yield _pdf(file.url, rules)
            case AudioPart(heard):
                yield {"inlineData": {"mimeType": f"audio/{heard.format}", "data": heard.data}}
    if message.refusal:
        yield {"text": message.refusal}


def _image(url: str, rules: GeminiRules) -> Block:
    """Return a picture that came along, or where it lies."""
    if (found := IMAGE.fullmatch(url)) is not None:
        return {"inlineData": {"mimeType": found[1].lower(), "data": found[2]}}
    if url[:5].lower() == "data:":
        words = "An image is a data URL in base64, such as data:image/png;base64,…"
        raise UpstreamRefused(words, outcome="unsayable", param="messages", code="invalid_image_url")
    ending = url.partition("?")[0].rpartition(".")[2].lower()
    return _elsewhere(url, f"image/{ending if ending in FETCHED else 'jpeg'}", rules)


def _pdf(url: str, rules: GeminiRules) -> Block:
    """Return a PDF that came along, or where it lies."""
    if url.startswith(PDF):
        return {"inlineData": {"mimeType": "application/pdf", "data": url.removeprefix(PDF)}}
    return _elsewhere(url, "application/pdf", rules)


def _elsewhere(url: str, kind: str, rules: GeminiRules) -> Block:
    """Return a file that the upstream fetches. Raises Unsayable for one of the provider's account, which is no
    caller's, and for a film, whose length nothing bounds: both lie at Google."""
    if not rules.fetches:
        words = "The model that answers here fetches no images or PDFs. Send them in base64."
        raise Unsayable(words, param="messages", code="invalid_image_url")
    try:
        found = read_url(url, LONGEST_URL)
        is_googles = GOOGLES.search(found.host) is not None
    except BadUrl as exc:
        words = f"The URL of an image or a PDF {exc}. Send a public https URL, or the file itself in base64."
        raise Unsayable(words, param="messages", code="invalid_image_url") from None
    if is_googles or found.scheme != "https":
        words = "Images and PDFs lie at public https URLs, and not at Google's: no files of its accounts are read here,"
        raise Unsayable(f"{words} nor films. Send them in base64.", param="messages", code="invalid_image_url")
    return {"fileData": {"mimeType": kind, "fileUri": url}}


def _call(call: ToolCall) -> Block:
    """Return a call that the model made earlier."""
    return {"functionCall": {"id": call.id, "name": safe_name(call.function.name), "args": arguments_of(call)}}


def safe_name(name: str) -> str:
    """Return the name of a function in Gemini's alphabet: the same for the same name, and another for another. It comes
    back as the caller gave it."""
    if SAFE.fullmatch(name):
        return name
    return f"_{STRANGE.sub('_', name)[:KEPT]}_{digest_of(name)}"


def _is_no_result(part: Block) -> bool:
    return "functionResponse" not in part


def _declaration(tool: Tool) -> Block:
    function = tool.function
    shown: Block = {"name": safe_name(function.name), "description": function.description or function.name}
    if any(
        name not in SAYS_NOTHING and said not in ({}, [], False) for name, said in (function.parameters or {}).items()
    ):
        shown["parametersJsonSchema"] = gemini_schema(function.parameters or {})  # a schema of nothing is refused
    return shown


def _calling(request: ChatRequest) -> Block:
    match request.tool_choice:
        case NamedTool(function):
            return {"mode": "ANY", "allowedFunctionNames": [safe_name(function.name)]}
        case choice:
            return {"mode": MODES[choice or "auto"]}


def _answer_form(request: ChatRequest, rules: GeminiRules) -> Block:
    """Return how an answer in JSON is asked for."""
    form = request.response_format
    if not isinstance(form, JsonObjectFormat | JsonSchemaFormat):
        return {}
    if request.tools and request.tool_choice != "none" and not rules.takes_json_with_tools:
        words = "The model that answers here gives no JSON while it has tools. Send 'response_format' without 'tools'."
        raise Unsayable(words, param="response_format")
    schema = form.json_schema.schema if isinstance(form, JsonSchemaFormat) else None
    bound = {"responseJsonSchema": gemini_schema(schema)} if schema else {}
    return {"responseMimeType": "application/json", **bound}


def _thinking(request: ChatRequest, rules: GeminiRules, limit: int) -> tuple[Block, list[str]]:
    """Return how the model is asked to think within an answer of ``limit`` tokens, and what of the request it cannot
    do; without a wish, nothing."""
    effort = request.reasoning_effort
    if effort is None:
        return {}, []
    is_off = effort == "none"
    if rules.takes_budget and is_off:
        is_least = not rules.can_be_off
        return {"thinkingBudget": rules.least_budget if is_least else 0}, ["reasoning_effort"] if is_least else []
    if rules.takes_budget:
        room = limit * (ANSWER_SHARE - 1) // ANSWER_SHARE
        budget = max(rules.least_budget, min(BUDGETS["high" if effort == "xhigh" else effort], room))
        return {"thinkingBudget": budget, "includeThoughts": True}, []
    if not rules.levels:
        return {}, [] if is_off else ["reasoning_effort"]
    wanted = EFFORTS.index("minimal" if is_off else "high" if effort == "xhigh" else effort)
    level = next((name for name in rules.levels if EFFORTS.index(name) >= wanted), rules.levels[-1])
    return {"thinkingLevel": level, **({} if is_off else {"includeThoughts": True})}, (
        ["reasoning_effort"] if is_off else []
    )
