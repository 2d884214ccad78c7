# Traffic of Bedrock's Converse and ConverseStream, written down by Amazon's pages: no recorded traffic was at hand.

from __future__ import annotations

import json
import struct
from typing import Any
from zlib import crc32

from msgspec.structs import replace

from gateway.upstreams.bedrock.wire_format import BedrockFormat
from protocol.chat import FinishReason, Function, Tool
from protocol.usage import Usage
from tests.wire.traffic import CHAT, Failing, Said, Streamed, Whole, WireFormat

USAGE = {"inputTokens": 170, "outputTokens": 90, "totalTokens": 1290}
USAGE |= {"cacheReadInputTokens": 1024, "cacheWriteInputTokens": 6}
COUNTED = Usage(input_tokens=1200, cached_input_tokens=1024, cache_write_tokens=6, output_tokens=90)
TOOLS = replace(CHAT, tools=(Tool(Function("weather")), Tool(Function("clock"))))
WEATHER, CLOCK = ("tooluse_1", "weather", '{"city":"Zürich"}'), ("tooluse_2", "clock", "{}")
CALLED = Said(finish=(FinishReason.TOOL_CALLS,), calls=(WEATHER, CLOCK), usage=COUNTED)
GREETING = Said(("Grüezi 東京 🚪",), usage=COUNTED)


def message(headers: dict[str, str], payload: bytes) -> bytes:
    """Return a message of an event stream: Amazon's framing, written down a second time."""
    head = b"".join(
        bytes([len(name)]) + name.encode() + b"\x07" + struct.pack(">H", len(value.encode())) + value.encode()
        for name, value in headers.items()
    )
    prelude = struct.pack(">II", 16 + len(head) + len(payload), len(head))
    start = prelude + struct.pack(">I", crc32(prelude)) + head + payload
    return start + struct.pack(">I", crc32(start))


def event(kind: str, body: Any) -> bytes:
    headers = {":event-type": kind, ":message-type": "event"}
    return message(headers, body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode())


def exception(kind: str) -> bytes:
    headers = {":exception-type": kind, ":message-type": "exception"}
    return message(headers, b'{"message":"What upstream says."}')


def delta(place: int, **said: Any) -> bytes:
    return event("contentBlockDelta", {"contentBlockIndex": place, "delta": said, "p": "a"})


def tool(place: int, ident: str, name: str, *pieces: str) -> bytes:
    start = {"toolUse": {"toolUseId": ident, "name": name}}
    begun = event("contentBlockStart", {"contentBlockIndex": place, "start": start})
    return begun + b"".join(delta(place, toolUse={"input": piece}) for piece in pieces) + stop(place)


def stop(place: int) -> bytes:
    return event("contentBlockStop", {"contentBlockIndex": place})


def end(reason: str = "end_turn", usage: Any = USAGE) -> bytes:
    told = {} if usage is None else {"usage": usage}
    return event("messageStop", {"stopReason": reason}) + event("metadata", {**told, "metrics": {"latencyMs": 7}})


END_OF_TEXT = end()
START = event("messageStart", {"role": "assistant"})
WORDS = START + delta(0, text="Grü") + delta(0, text="ezi 東") + delta(0, text="京 🚪") + stop(0)
THOUGHT = delta(0, reasoningContent={"text": "Hm."}) + delta(0, reasoningContent={"signature": "EqQB"}) + stop(0)
CALLS = tool(1, "tooluse_1", "weather", '{"city"', ':"Zürich"}') + tool(2, "tooluse_2", "clock")

STREAMED = (
    Streamed("text with usage", CHAT, WORDS + end(), GREETING),
    Streamed("thinking and calls", TOOLS, START + THOUGHT + CALLS + end("tool_use"), CALLED),
    Streamed("withheld thinking", CHAT,
             START + delta(0, reasoningContent={"redactedContent": "AAAA"}) + stop(0) + delta(1, text="Yes.") + stop(1)
             + end(), Said(("Yes.",), usage=COUNTED)),
    Streamed("cut at the length", CHAT, WORDS + end("max_tokens"),
             Said(GREETING.text, (FinishReason.LENGTH,), usage=COUNTED)),
    *(Streamed(f"withheld: {why}", CHAT, WORDS + end(why),
               Said(GREETING.text, (FinishReason.CONTENT_FILTER,), usage=COUNTED))
      for why in ("guardrail_intervened", "content_filtered")),
    Streamed("a stranger's event", CHAT, WORDS + event("trace", {"x": 1}) + end(), GREETING),
    Streamed("no count", CHAT, WORDS + event("messageStop", {"stopReason": "end_turn"}), Said(GREETING.text)),
    Streamed("a count that says nothing", CHAT, WORDS + end(usage=None), Said(GREETING.text)),
    Streamed("cut in mid-stream", CHAT, WORDS, Said(GREETING.text, (None,)), "cut"),
    Streamed("cut inside a message", CHAT, WORDS + end()[:40], Said(GREETING.text, (None,)), "cut"),
    Streamed("nothing at all", CHAT, b"", Said(finish=(None,)), "cut"),
    Streamed("an HTML page", CHAT, b"<html><h1>502</h1></html>", Said(finish=(None,)), "malformed"),
    Streamed("a payload that is no JSON", CHAT, WORDS + event("metadata", b"{") + end(), Said(GREETING.text, (None,)),
             "malformed"),
    Streamed("a flipped bit", CHAT, WORDS + end()[:-9] + b"\x00" + end()[-8:],
             Said(GREETING.text, (None,)), "malformed"),
    *(Streamed(f"in mid-stream: {kind}", CHAT, WORDS + exception(kind) + end(), Said(GREETING.text, (None,)), outcome)
      for kind, outcome in (("throttlingException", "overloaded"), ("modelStreamErrorException", "error_frame"))),
)  # fmt: skip


def body(*content: Any, reason: str = "end_turn", usage: Any = USAGE, **more: Any) -> bytes:
    said = {"output": {"message": {"role": "assistant", "content": [*content]}}, "stopReason": reason, **more}
    return json.dumps(said | ({} if usage is None else {"usage": usage}), ensure_ascii=False).encode()


def text(words: str) -> dict[str, Any]:
    return {"text": words}


REASONED = {"reasoningContent": {"reasoningText": {"text": "Hm.", "signature": "EqQB"}}}
USED = (
    {"toolUse": {"toolUseId": "tooluse_1", "name": "weather", "input": {"city": "Zürich"}}},
    {"toolUse": {"toolUseId": "tooluse_2", "name": "clock", "input": {}}},
)
WHOLE = (
    Whole("text", CHAT, body(text("Grüezi "), text("🚪")), Said(("Grüezi 🚪",), usage=COUNTED)),
    Whole("thinking", CHAT, body(REASONED, text("Yes.")), Said(("Yes.",), usage=COUNTED)),
    Whole("withheld thinking", CHAT, body({"reasoningContent": {"redactedContent": "AAAA"}}, text("Yes.")),
          Said(("Yes.",), usage=COUNTED)),
    Whole("calls", TOOLS, body(REASONED, *USED, reason="tool_use"), CALLED),
    Whole("a guardrail", CHAT, body(text("No."), reason="guardrail_intervened"),
          Said(("No.",), (FinishReason.CONTENT_FILTER,), usage=COUNTED)),
    Whole("the length", CHAT, body(text("Yes."), reason="max_tokens"),
          Said(("Yes.",), (FinishReason.LENGTH,), usage=COUNTED)),
    Whole("a stranger's block", CHAT, body({"audio": {}}, text("Yes."), metrics={"latencyMs": 3}),
          Said(("Yes.",), usage=COUNTED)),
    Whole("no count", CHAT, body(text("Yes."), usage=None), Said(("Yes.",))),
)  # fmt: skip

SAYS = b'{"message":"What upstream says."}'


def failing(name: str, status: int, kind: str, *told: Any, message: bytes = SAYS) -> Failing:
    return Failing(name, status, {"x-amzn-errortype": f"{kind}:http://internal.amazon.com/"}, message, *told)


FAILING = (
    failing("throttled", 429, "ThrottlingException", 429, "rate_limit_exceeded", True, "rate_limited"),
    failing("a model that is not ready", 429, "ModelNotReadyException", 502, "upstream_error", True, "overloaded"),
    failing("unavailable", 503, "ServiceUnavailableException", 502, "upstream_error", True, "overloaded"),
    failing("a model that timed out", 408, "ModelTimeoutException", 504, "upstream_timeout", True, "timeout"),
    failing("a model that broke", 424, "ModelErrorException", 502, "upstream_error", True, "status_424"),
    failing("a quota", 400, "ServiceQuotaExceededException", 429, "rate_limit_exceeded", True, "rate_limited"),
    failing("no such model", 404, "ResourceNotFoundException", 502, "upstream_error", True, "not_found"),
    failing("a request at fault", 400, "ValidationException", 400, None, False, "refused"),
    failing("too long", 400, "ValidationException", 400, "context_length_exceeded", True, "refused",
            message=b'{"message":"Input is too long for requested model."}'),
    *(failing(f"our credentials: {kind}", 403, kind, 502, "upstream_error", True, "refused_key")
      for kind in ("AccessDeniedException", "UnrecognizedClientException", "ExpiredTokenException")),
    Failing("a broken page", 500, {}, b"<html></html>", 502, "upstream_error", True, "status_500"),
)  # fmt: skip

BEDROCK = WireFormat(
    name="bedrock",
    make=BedrockFormat,
    streamed=STREAMED,
    whole=WHOLE,
    nonsense=(b"", b"null", b"[]", b"{}", b'{"output":{}}', b'{"output":{"message":{"content":7}}}', b"<html>"),
    failing=FAILING,
)
