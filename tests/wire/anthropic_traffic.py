# Traffic of Anthropic's Messages API, written down by the conventions.

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

from msgspec.structs import replace

from gateway.upstreams.anthropic.wire_format import AnthropicFormat
from protocol.chat import FinishReason, Function, JsonObjectFormat, Tool
from protocol.usage import Usage
from tests.wire.traffic import CHAT, Failing, Said, Streamed, Whole, WireFormat

# 1,200 tokens of prompt: 1,024 read from the cache, 100 written to it, 76 neither.
PROMPT = {"input_tokens": 76, "cache_creation_input_tokens": 100, "cache_read_input_tokens": 1024}
USAGE = {**PROMPT, "output_tokens": 90, "output_tokens_details": {"thinking_tokens": 64}, "service_tier": "standard"}
COUNTED = Usage(
    input_tokens=1200, cached_input_tokens=1024, cache_write_tokens=100, output_tokens=90, reasoning_tokens=64
)
IN_JSON = replace(CHAT, response_format=JsonObjectFormat())
ODD = replace(CHAT, tools=(Tool(Function("städte.wetter")),))
SAFE = "st_dte_wetter_" + sha256("städte.wetter".encode()).hexdigest()[:16]
WEATHER = ("toolu_a1", "weather", '{"city":"Zürich"}')
CLOCK = ("toolu_b2", "clock", "{}")


def event(kind: str, **more: Any) -> bytes:
    data = json.dumps({"type": kind, **more}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


def start(usage: dict[str, Any] | None = None) -> bytes:
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None}
    return event("message_start", message={**message, "usage": usage or {**PROMPT, "output_tokens": 1}})


def block(index: int, kind: str, *deltas: dict[str, Any], **head: Any) -> bytes:
    begun = event("content_block_start", index=index, content_block={"type": kind, **head})
    pieces = b"".join(event("content_block_delta", index=index, delta=delta) for delta in deltas)
    return begun + pieces + event("content_block_stop", index=index)


def text(*words: str, index: int = 0) -> bytes:
    return block(index, "text", *({"type": "text_delta", "text": word} for word in words), text="")


def thinking(index: int = 0) -> bytes:
    deltas = ({"type": "thinking_delta", "thinking": "Hm."}, {"type": "signature_delta", "signature": "EqQB"})
    return block(index, "thinking", *deltas, thinking="", signature="")


def call(index: int, ident: str, name: str, *arguments: str) -> bytes:
    deltas = ({"type": "input_json_delta", "partial_json": piece} for piece in ("", *arguments))
    return block(index, "tool_use", *deltas, id=ident, name=name, input={})


def end(reason: str = "end_turn", usage: dict[str, Any] | None = None) -> bytes:
    delta = {"stop_reason": reason, "stop_sequence": None}
    return event("message_delta", delta=delta, usage=usage or USAGE) + event("message_stop")


def body(content: list[dict[str, Any]] | None = None, reason: str = "end_turn", **more: Any) -> bytes:
    said = [{"type": "text", "text": "Grüezi 🚪"}] if content is None else content
    frame = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None}
    return json.dumps({**frame, "content": said, "stop_reason": reason, "usage": USAGE, **more}).encode()


def failure(status: int, kind: str, **more: Any) -> tuple[int, bytes]:
    error = {"type": kind, "message": "What upstream says."} | more
    return status, json.dumps({"type": "error", "error": error, "request_id": "req_1"}).encode()


PING = event("ping")
WORDS = text("Grü", "ezi 東", "京 🚪")
GREETING = Said(("Grüezi 東京 🚪",), usage=COUNTED)
BEGUN = Usage(input_tokens=1200, cached_input_tokens=1024, cache_write_tokens=100, output_tokens=1)
UNFINISHED = Said(GREETING.text, (None,), usage=BEGUN)

STREAMED = (
    Streamed("text with usage", CHAT, start() + PING + WORDS + end(), GREETING),
    Streamed("only output counted at the end", CHAT,
             start() + WORDS + end(usage={"output_tokens": 90, "output_tokens_details": {"thinking_tokens": 64}}),
             GREETING),
    Streamed("no usage at all", CHAT, start({"nothing": 0}) + WORDS + end(usage={"nothing": 0}), Said(GREETING.text)),
    Streamed("counts that grow", CHAT,
             start() + WORDS + event("message_delta", delta={}, usage={"output_tokens": 40}) + end(), GREETING),
    Streamed("a stop reason without message_stop", CHAT,
             start() + WORDS + end().removesuffix(event("message_stop")), GREETING),
    Streamed("thinking, then text", CHAT, start() + thinking() + text("Yes.", index=1) + end(),
             Said(("Yes.",), usage=COUNTED)),
    Streamed("thinking that is withheld", CHAT,
             start() + block(0, "redacted_thinking", data="Ej0K") + text("Yes.", index=1) + end(),
             Said(("Yes.",), usage=COUNTED)),
    Streamed("a block that begins with its text", CHAT, start() + block(0, "text", text="Yes.") + end(),
             Said(("Yes.",), usage=COUNTED)),
    Streamed("events of later versions", CHAT,
             start() + event("novelty", index=0) + block(0, "novelty_block", {"type": "novelty_delta"}) + WORDS + end(),
             GREETING),
    Streamed("data in two lines", CHAT, (start() + WORDS + end()).replace(b',"index"', b'\ndata: ,"index"'), GREETING),
    Streamed("CR LF", CHAT, (start() + PING + WORDS + end()).replace(b"\n", b"\r\n"), GREETING),
    Streamed("null for what is left out", CHAT,
             event("message_start", message={"id": None, "usage": None}) + event("content_block_start", index=0)
             + event("content_block_delta", index=0, delta=None) + event("message_delta", delta=None, usage=None)
             + block(0, "text", {"type": "text_delta", "text": "Yes.", "thinking": None}, text=None, citations=None)
             + end(), Said(("Yes.",), usage=COUNTED)),
    *(Streamed(f"usage that is none: {told}", CHAT,
               event("message_start", message={"usage": told}) + WORDS + end().replace(json.dumps(
                   USAGE, separators=(",", ":")).encode(), json.dumps(told).encode()), Said(GREETING.text))
      for told in ("n/a", [], 7, {"input_tokens": "12"}, {"output_tokens_details": []})),
    Streamed("arguments at once", CHAT,
             start() + block(0, "tool_use", id=WEATHER[0], name=WEATHER[1], input={"city": "Zürich"})
             + block(1, "tool_use", id=CLOCK[0], name=CLOCK[1], input=None) + end("tool_use"),
             Said(finish=(FinishReason.TOOL_CALLS,), calls=(WEATHER, CLOCK), usage=COUNTED)),
    Streamed("blocks between each other", CHAT,
             start()
             + event("content_block_start", index=1, content_block={"type": "tool_use", "id": WEATHER[0],
                                                                    "name": WEATHER[1], "input": {}})
             + event("content_block_start", index=2, content_block={"type": "tool_use", "id": CLOCK[0],
                                                                    "name": CLOCK[1], "input": {}})
             + event("content_block_delta", index=1, delta={"type": "input_json_delta", "partial_json": '{"city":'})
             + event("content_block_delta", index=0, delta={"type": "text_delta", "text": "Well."})
             + event("content_block_stop", index=2)
             + event("content_block_delta", index=1, delta={"type": "input_json_delta", "partial_json": '"Zürich"}'})
             + event("content_block_stop", index=1) + end("tool_use"),
             Said(("Well.",), (FinishReason.TOOL_CALLS,), calls=(WEATHER, CLOCK), usage=COUNTED)),
    Streamed("cut at the length", CHAT, start() + WORDS + end("max_tokens"),
             Said(GREETING.text, (FinishReason.LENGTH,), usage=COUNTED)),
    Streamed("a pause", CHAT, start() + WORDS + end("pause_turn"), GREETING),
    Streamed("a stranger's reason", CHAT, start() + WORDS + end("novelty"), GREETING),
    Streamed("the context is full", CHAT, start() + WORDS + end("model_context_window_exceeded"),
             Said(GREETING.text, (FinishReason.LENGTH,), usage=COUNTED)),
    Streamed("a stop sequence", CHAT, start() + WORDS + end("stop_sequence"), GREETING),
    Streamed("withheld", CHAT, start() + end("refusal"), Said(finish=(FinishReason.CONTENT_FILTER,), usage=COUNTED)),
    Streamed(
        "text and two tool calls, one without arguments",
        CHAT,
        start() + text("Let me see.") + call(1, *WEATHER[:2], '{"city":', '"Zürich"}') + call(2, *CLOCK[:2])
        + end("tool_use"),
        Said(("Let me see.",), (FinishReason.TOOL_CALLS,), calls=(WEATHER, CLOCK), usage=COUNTED),
    ),
    Streamed("an answer in JSON", IN_JSON,
             start() + call(0, "toolu_a1", "json_answer", '{"city":', '"Zürich"}') + end("tool_use"),
             Said(('{"city":"Zürich"}',), usage=COUNTED)),
    Streamed("an answer in JSON, at once", IN_JSON,
             start() + block(0, "tool_use", id="a", name="json_answer", input={"a": 1}) + end("tool_use"),
             Said(('{"a":1}',), usage=COUNTED)),
    Streamed("an empty answer in JSON", IN_JSON, start() + call(0, "a", "json_answer") + end("tool_use"),
             Said(("{}",), usage=COUNTED)),
    Streamed("two answers in JSON, of which the first counts", IN_JSON,
             start() + call(0, "a", "json_answer", '{"a":1}') + call(1, "b", "json_answer", "{}") + end("tool_use"),
             Said(('{"a":1}',), usage=COUNTED)),
    Streamed("half an answer in JSON", IN_JSON, start() + call(0, "a", "json_answer", '{"a":') + end("max_tokens"),
             Said(('{"a":',), (FinishReason.LENGTH,), usage=COUNTED)),
    Streamed("words in place of JSON", IN_JSON, start() + WORDS + end(), GREETING),
    Streamed("a call beside an answer in JSON", IN_JSON,
             start() + call(0, *WEATHER[:2], WEATHER[2]) + call(1, "b", "json_answer", '{"a":1}') + end("tool_use"),
             Said(('{"a":1}',), (FinishReason.TOOL_CALLS,), calls=(WEATHER,), usage=COUNTED)),
    Streamed("a tool by its safe name", ODD, start() + call(0, "a", SAFE, "{}") + end("tool_use"),
             Said(finish=(FinishReason.TOOL_CALLS,), calls=(("a", "städte.wetter", "{}"),), usage=COUNTED)),
    Streamed("texts, one of them cited", CHAT,
             start() + text("It is", index=0)
             + block(1, "text", {"type": "citations_delta", "citation": {"cited_text": "東京"}},
                     {"type": "text_delta", "text": " 東京."}, text="", citations=[]) + end(),
             Said(("It is 東京.",), usage=COUNTED)),
    Streamed("why it was withheld, and what was edited", CHAT,
             start() + event("message_delta", delta={"stop_reason": "refusal", "stop_details": {"category": "bio"}},
                             usage=USAGE, context_management={"applied_edits": []}) + event("message_stop"),
             Said(finish=(FinishReason.CONTENT_FILTER,), usage=COUNTED)),
    Streamed("cut in mid-stream", CHAT, start() + WORDS, UNFINISHED, "cut"),
    Streamed("cut inside an event", CHAT, start() + WORDS + end()[:40], UNFINISHED, "cut"),
    Streamed("message_stop without a reason", CHAT, start() + WORDS + event("message_stop"), UNFINISHED, "cut"),
    Streamed("nothing at all", CHAT, b"", Said(finish=(None,)), "cut"),
    Streamed("pings alone", CHAT, PING * 3, Said(finish=(None,)), "cut"),
    Streamed("an HTML page", CHAT, b"<html><h1>502</h1></html>", Said(finish=(None,)), "cut"),
    Streamed("half an event", CHAT, start() + WORDS + b'event: message_delta\ndata: {"type":"mess\n\n' + end(),
             UNFINISHED, "malformed"),
    Streamed("overloaded in mid-stream", CHAT,
             start() + WORDS + event("error", error={"type": "overloaded_error", "message": "Overloaded"}) + end(),
             UNFINISHED, "overloaded"),
    Streamed("an error as the first event", CHAT, event("error", error={"type": "api_error", "message": "no"}),
             Said(finish=(None,)), "error_frame"),
)  # fmt: skip

WHOLE = (
    Whole("text", CHAT, body(), Said(("Grüezi 🚪",), usage=COUNTED)),
    Whole("two texts", CHAT, body([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
          Said(("ab",), usage=COUNTED)),
    Whole("thinking", CHAT,
          body([{"type": "thinking", "thinking": "Hm.", "signature": "EqQB"}, {"type": "text", "text": "Yes."}]),
          Said(("Yes.",), usage=COUNTED)),
    Whole("no cache", CHAT, body(usage={"input_tokens": 3, "output_tokens": 2, "cache_read_input_tokens": None}),
          Said(("Grüezi 🚪",), usage=Usage(input_tokens=3, output_tokens=2))),
    *(Whole(f"no count: {counts}", CHAT, body(usage=counts), Said(("Grüezi 🚪",)))
      for counts in ({}, {"input_tokens": 3, "output_tokens": -7}, {"input_tokens": None, "output_tokens": 1},
                     {"input_tokens": 0, "output_tokens": 1}, {"input_tokens": 10**30, "output_tokens": 1})),
    Whole("two tool calls", CHAT,
          body([{"type": "tool_use", "id": WEATHER[0], "name": WEATHER[1], "input": {"city": "Zürich"}},
                {"type": "tool_use", "id": CLOCK[0], "name": CLOCK[1], "input": {}}], "tool_use"),
          Said(finish=(FinishReason.TOOL_CALLS,), calls=(WEATHER, CLOCK), usage=COUNTED)),
    Whole("an answer in JSON", IN_JSON,
          body([{"type": "tool_use", "id": "a", "name": "json_answer", "input": {"a": 1}}], "tool_use"),
          Said(('{"a":1}',), usage=COUNTED)),
    Whole("a call beside an answer in JSON", IN_JSON,
          body([{"type": "tool_use", "id": CLOCK[0], "name": CLOCK[1], "input": {}},
                {"type": "tool_use", "id": "a", "name": "json_answer", "input": {}}], "tool_use"),
          Said(("{}",), (FinishReason.TOOL_CALLS,), calls=(CLOCK,), usage=COUNTED)),
    Whole("a tool by its safe name", ODD,
          body([{"type": "tool_use", "id": "a", "name": SAFE, "input": {}}], "tool_use"),
          Said(finish=(FinishReason.TOOL_CALLS,), calls=(("a", "städte.wetter", "{}"),), usage=COUNTED)),
    Whole("null for what is left out", CHAT,
          body([{"type": "text", "text": None}, {"type": "text", "text": "Yes.", "citations": None}], id=None),
          Said(("Yes.",), usage=COUNTED)),
    *(Whole(f"usage that is none: {told}", CHAT, body(usage=told), Said(("Grüezi 🚪",)))
      for told in ("n/a", [], {"input_tokens": "12"}, {"output_tokens_details": []})),
    Whole("no reason", CHAT, body(stop_reason=None), Said(("Grüezi 🚪",), usage=COUNTED)),
    Whole("a stranger's word", CHAT, body(reason="novelty"), Said(("Grüezi 🚪",), usage=COUNTED)),
)  # fmt: skip

NONSENSE = (b"", b"null", b"<html>", b'{"type":"message"', b'{"type":"error","error":{"type":"api_error"}}',
            b'{"content":"x","stop_reason":"end_turn"}')  # fmt: skip


def _failing(
    name: str, answer: tuple[int, bytes], client: int, code: str | None, moves_on: bool, outcome: str
) -> Failing:
    return Failing(name, answer[0], {}, answer[1], client, code, moves_on, outcome)


def said(status: int, message: str) -> tuple[int, bytes]:
    return failure(status, "invalid_request_error", message=message)


CREDIT = "Your credit balance is too low to access the Anthropic API."
LIMIT = "You have reached your specified API usage limits."
CAP = {"error_code": "enforced_spend_limit_reached"}
BUSY, BROKEN = "rate_limit_exceeded", "upstream_error"
FAILING = (
    _failing("our key refused", failure(401, "authentication_error"), 502, BROKEN, True, "refused_key"),
    _failing("our account not allowed", failure(403, "permission_error"), 502, BROKEN, True, "refused_key"),
    _failing("our bill not paid", failure(402, "billing_error"), 429, BUSY, True, "spend_cap"),
    _failing("our credit used up", said(400, f"{CREDIT} Please go to Plans & Billing."), 429, BUSY, True, "spend_cap"),
    _failing(
        "our own limit reached",
        said(400, f"{LIMIT} You will regain access on 2026-12-01."),
        429,
        BUSY,
        True,
        "spend_cap",
    ),
    _failing("a caller's words of credit", said(400, f"tools.0: {CREDIT!r} is no name"), 400, None, False, "refused"),
    _failing("a bad request", failure(400, "invalid_request_error"), 400, None, False, "refused"),
    _failing(
        "too long a prompt",
        (
            400,
            json.dumps(
                {
                    "type": "error",
                    "error": {
                        "type": "invalid_request_error",
                        "message": "prompt is too long: 209512 tokens > 200000 maximum",
                    },
                }
            ).encode(),
        ),
        400,
        "context_length_exceeded",
        True,
        "refused",
    ),
    _failing("unknown model", failure(404, "not_found_error"), 502, BROKEN, True, "not_found"),
    _failing("a conflict", failure(409, "conflict_error"), 400, None, False, "refused"),
    _failing("too large", failure(413, "request_too_large"), 413, None, False, "refused"),
    _failing("rate limit", failure(429, "rate_limit_error"), 429, BUSY, True, "rate_limited"),
    _failing("spent", failure(429, "rate_limit_error", details=CAP), 429, BUSY, True, "spend_cap"),
    _failing("broken", failure(500, "api_error"), 502, BROKEN, True, "status_500"),
    _failing("their timeout", failure(504, "timeout_error"), 502, BROKEN, True, "status_504"),
    _failing("overloaded", failure(529, "overloaded_error"), 502, BROKEN, True, "overloaded"),
    _failing("an HTML page", (502, b"<html>"), 502, BROKEN, True, "status_502"),
)

ANTHROPIC = WireFormat("anthropic", AnthropicFormat, STREAMED, WHOLE, NONSENSE, FAILING)
