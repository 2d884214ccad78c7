# The small calls that `tollgate doctor --live` makes: each shows one thing that a wire format takes for granted.

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from protocol.chat import (
    ChatRequest,
    Function,
    FunctionCall,
    ImagePart,
    ImageUrl,
    JsonObjectFormat,
    Message,
    NamedFunction,
    NamedTool,
    TextPart,
    Tool,
    ToolCall,
)
from protocol.messages import DocumentBlock, MessagesRequest, PdfSource, TextBlock, Turn
from protocol.messages_to_chat import to_chat
from router.catalog.targets import Capability, ModelSpec

FEW = 64  # tokens of most answers
A_PAGE = 6_000  # tokens that one page of a PDF, as text and as a picture, has at the most, with its question
HELLO = Message("user", "Say hello in five words.")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool(Function("weather", "The weather in a city.", CITY))
RULES = (f"Rule {number}: answer question {number} with the word {number * 7919}." for number in range(1, 301))
PREFIX = "\n".join(RULES)  # longer than the shortest prefix that any provider caches


class LiveCall(Struct, frozen=True, kw_only=True):
    """One call. ``shows``: what it is for, by which its answer is judged; ``judging.py`` knows what each means."""

    name: str
    request: ChatRequest
    native: MessagesRequest | None = None  # the same in Anthropic's form, for its own format
    streams: bool = False
    most_prompt: int | None = None  # tokens, where that is known better than from its bytes
    shows: str = "words"  # length, tools, json, thinking, cache, left, unknown_model, bad_value, bad_key


def calls_for(spec: ModelSpec, format: str) -> list[LiveCall]:
    """Return the calls that a model can be asked, those that are cheap and tell most first."""
    plain = ChatRequest(model="", messages=(HELLO,), max_tokens=FEW)
    counting, told = (_ask("Count to ten in words."),), (Message("system", "Answer: Grüezi 東京 🚪"), HELLO)
    calls = [
        LiveCall(name="whole", request=plain),
        LiveCall(name="stream", request=plain, streams=True),
        LiveCall(
            name="cut at its length",
            request=replace(plain, max_tokens=16, messages=(_ask("Count to 200."),)),
            shows="length",
        ),
        LiveCall(name="stop string", request=replace(plain, stop=("five",), messages=counting)),
        LiveCall(name="instructions", request=replace(plain, messages=told)),
        LiveCall(name="unknown model", request=plain, shows="unknown_model"),
        LiveCall(name="bad value", request=plain, shows="bad_value"),
        LiveCall(name="wrong key", request=plain, shows="bad_key"),
        LiveCall(name="left in mid-stream", request=replace(plain, messages=counting), streams=True, shows="left"),
    ]
    if Capability.TOOLS in spec.capabilities:
        calls += _with_tools(plain)
    if Capability.JSON in spec.capabilities:
        said = replace(
            plain, messages=(_ask('Answer with the JSON {"word": "gate"}.'),), response_format=JsonObjectFormat()
        )
        calls.append(LiveCall(name="JSON", request=said, shows="json"))
    if Capability.VISION in spec.capabilities:
        calls.append(_with_picture(plain) if format == "openai" else _with_pdf())
    thinking = replace(plain, max_tokens=1100, reasoning_effort="low", messages=(_ask("What is 17 times 23?"),))
    long = replace(plain, messages=(Message("system", PREFIX), _ask("Question 7?")), max_tokens=16)
    return [
        *calls,
        LiveCall(name="thinking", request=thinking, streams=True, shows="thinking"),
        LiveCall(name="cache, written", request=long),
        LiveCall(name="cache, read", request=long, shows="cache"),
    ]


def _ask(words: str) -> Message:
    return Message("user", words)


def _with_tools(plain: ChatRequest) -> list[LiveCall]:
    asked = _ask("What is the weather in Bern?")
    forced: dict[str, Any] = {"tools": (WEATHER,), "tool_choice": NamedTool(NamedFunction("weather"))}
    call = ToolCall("call_1", FunctionCall("weather", '{"city":"Bern"}'))
    told = (asked, Message("assistant", tool_calls=(call,)), Message("tool", "Snow, -3 °C", tool_call_id="call_1"))
    called = replace(plain, messages=(asked,), **forced)
    return [
        LiveCall(name="tool", request=called, shows="tools"),
        LiveCall(name="tool, streamed", request=called, streams=True, shows="tools"),
        LiveCall(name="a tool's result", request=replace(plain, messages=told, tools=(WEATHER,))),
    ]


def _with_picture(plain: ChatRequest) -> LiveCall:
    parts = (TextPart("What colour is this? One word."), ImagePart(ImageUrl(_png(), "low")))
    return LiveCall(name="picture", request=replace(plain, messages=(Message("user", parts),)))


def _with_pdf() -> LiveCall:
    blocks = (DocumentBlock(PdfSource("application/pdf", _pdf())), TextBlock("Which word does the page name?"))
    native = MessagesRequest(model="", max_tokens=FEW, messages=(Turn("user", blocks),))
    return LiveCall(name="PDF", request=to_chat(native), native=native, most_prompt=A_PAGE)


def _png() -> str:
    """Return a red picture of 16 by 16 points as a URL."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + b"\xff\0\0" * 16) * 16
    head = struct.pack(">IIBBBBB", 16, 16, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _pdf() -> str:
    """Return a PDF of one page, which names a word, in base64."""
    text = b"BT /F 24 Tf 20 40 Td (The word is gate) Tj ET"
    objects = (
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 100]/Contents 4 0 R/Resources<</Font<</F 5 0 R>>>>>>",
        b"<</Length %d>>\nstream\n%s\nendstream" % (len(text), text),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    )
    file, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(file))
        file += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(objects) + 1
    end = b"trailer\n<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (size, len(file))
    file += b"xref\n0 %d\n0000000000 65535 f \n%s" % (size, table) + end
    return base64.b64encode(file).decode()
