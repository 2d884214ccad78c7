# Traffic of OpenAI's API and of services that speak its dialect a little differently, written down by the conventions.

from __future__ import annotations

import json
from typing import Any

from gateway.upstreams.openai.parts import made_up_id
from gateway.upstreams.openai.wire_format import OpenAIFormat
from protocol.chat import ChatRequest, FinishReason, Message
from protocol.completions import CompletionRequest
from protocol.embeddings import EmbeddingRequest
from protocol.usage import Usage
from tests.wire.traffic import CHAT, Failing, Said, Streamed, Whole, WireFormat

DONE = b"data: [DONE]\n\n"
TWO = ChatRequest(model="m", messages=(Message("user", "Hello"),), n=2)
TEXT = CompletionRequest(model="m", prompt="Once")
WEATHER = ("call_a1", "weather", '{"city":"Zürich"}')
CLOCK = ("call_b2", "clock", "{}")
USAGE = {
    "prompt_tokens": 1200,
    "completion_tokens": 90,
    "total_tokens": 1290,
    "prompt_tokens_details": {"cached_tokens": 1024, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 64, "accepted_prediction_tokens": 0},
}
COUNTED = Usage(input_tokens=1200, cached_input_tokens=1024, output_tokens=90, reasoning_tokens=64)


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, index: int = 0, **more: Any) -> bytes:
    choices = [] if delta is None else [{"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}]
    frame = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices}
    return event({**frame, "usage": None, "obfuscation": "x7Kq", **more})


def text_chunk(text: str, finish: str | None = None) -> bytes:
    choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": finish}
    return event({"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]})


def call_piece(index: int, arguments: str, **head: str) -> dict[str, Any]:
    function = {"arguments": arguments} | ({"name": head["name"]} if head else {})
    first = {"id": head["id"], "type": "function"} if head else {}
    return {"tool_calls": [{"index": index, **first, "function": function}]}


def body(message: dict[str, Any] | None = None, finish: str | None = "stop", **more: Any) -> bytes:
    said = {"role": "assistant", "content": "Grüezi 🚪", "refusal": None, "annotations": []} | (message or {})
    choice = {"index": 0, "message": said, "logprobs": None, "finish_reason": finish}
    frame = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "service_tier": "default"}
    return json.dumps({**frame, "choices": [choice], "usage": USAGE, **more}).encode()


def failure(status: int, kind: str, code: str | None, message: str = "What upstream says.") -> tuple[int, bytes]:
    error = {"message": message, "type": kind, "param": None, "code": code}
    return status, json.dumps({"error": error}).encode()


ROLE = chunk({"role": "assistant", "content": "", "refusal": None})
WORDS = chunk({"content": "Grü"}) + chunk({"content": "ezi 東"}) + chunk({"content": "京 🚪"})
STOP = chunk({}, "stop")
COUNT = chunk(usage=USAGE)
GREETING = Said(("Grüezi 東京 🚪",), usage=COUNTED)

# Azure's filter speaks first, without an id, a time or a choice; and in between, of a choice without a delta.
SAFE = {"hate": {"filtered": False, "severity": "safe"}}
NO_HEAD = {"id": "", "object": "", "created": 0, "model": "", "obfuscation": None}
OF_THE_PROMPT = chunk(**NO_HEAD, prompt_filter_results=[{"prompt_index": 0, "content_filter_results": SAFE}])
STRETCH = {"index": 0, "finish_reason": None, "content_filter_offsets": {"start_offset": 0, "end_offset": 4}}
OF_A_STRETCH = event(NO_HEAD | {"choices": [STRETCH | {"content_filter_results": SAFE}]})

STREAMED = (
    Streamed("text with usage", CHAT, ROLE + WORDS + STOP + COUNT + DONE, GREETING),
    Streamed("no usage", CHAT, ROLE + WORDS + STOP + DONE, Said(GREETING.text)),
    Streamed("usage beside the finish", CHAT, ROLE + WORDS + chunk({}, "stop", usage=USAGE) + DONE, GREETING),
    Streamed("usage that grows", CHAT, ROLE + chunk({"content": "a"}, usage={"prompt_tokens": 3}) + STOP + COUNT + DONE,
             Said(("a",), usage=COUNTED)),
    Streamed("Azure's filter in between", CHAT,
             OF_THE_PROMPT + ROLE + WORDS + OF_A_STRETCH + STOP + COUNT + DONE, GREETING),
    Streamed("Azure's filter ends the answer", CHAT,
             OF_THE_PROMPT + ROLE + WORDS + OF_A_STRETCH + chunk({}, "content_filter") + COUNT + DONE,
             Said(GREETING.text, (FinishReason.CONTENT_FILTER,), usage=COUNTED)),
    Streamed("Azure's filter, and a call without an id", CHAT,
             OF_THE_PROMPT + chunk({"tool_calls": [{"function": {"name": "clock", "arguments": "{}"}}]})
             + chunk({}, "tool_calls") + DONE,
             Said(finish=(FinishReason.TOOL_CALLS,), calls=((made_up_id("chatcmpl-1 1", 0, 0), *CLOCK[1:]),))),
    Streamed("finish without [DONE]", CHAT, ROLE + WORDS + STOP + COUNT, GREETING),
    Streamed("CR LF, comments and names", CHAT,
             b": hi\r\n\r\n" + (b"event: chunk\n" + (ROLE + WORDS + STOP + COUNT + DONE)).replace(b"\n", b"\r\n"),
             GREETING),
    Streamed("no space after the colon", CHAT, (ROLE + WORDS + STOP + COUNT + DONE).replace(b"data: ", b"data:"),
             GREETING),
    Streamed("data in two lines", CHAT,
             (ROLE + WORDS + STOP + COUNT + DONE).replace(b',"choices"', b'\ndata: ,"choices"'), GREETING),
    Streamed("bytes after [DONE]", CHAT, ROLE + WORDS + STOP + COUNT + DONE + chunk({"content": "late"}), GREETING),
    Streamed("usage before the finish", CHAT, ROLE + COUNT + WORDS + STOP + DONE, GREETING),
    Streamed("a space behind [DONE]", CHAT, ROLE + WORDS + STOP + COUNT + b"data: [DONE] \n\n", GREETING),
    Streamed("reasons that are empty until there is one", CHAT,
             chunk({"content": "a"}, "") + chunk({"content": "b"}, "") + STOP + DONE, Said(("ab",))),
    Streamed("cut before the reason that was empty", CHAT, chunk({"content": "a"}, ""), Said(("a",), (None,)), "cut"),
    Streamed("null for what is left out", CHAT,
             event({"choices": None, "usage": None}) + event({"choices": [{"index": None, "delta": None}]})
             + event({"choices": [{"delta": {"content": None, "tool_calls": None}, "logprobs": None}]})
             + WORDS + event({"id": 7, "created": None, "model": None, "choices": [], "usage": USAGE}) + STOP + DONE,
             GREETING),
    *(Streamed(f"usage that is none: {told}", CHAT, ROLE + WORDS + STOP + chunk(usage=told) + DONE, Said(GREETING.text))
      for told in ("n/a", [], 7, {"prompt_tokens": "12"}, {"prompt_tokens": 1, "prompt_tokens_details": []})),
    Streamed("content in parts, thinking among them", CHAT,
             chunk({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}]})
             + chunk({"content": [{"type": "text", "text": "Yes"}, {"type": "text", "text": "."}]}) + STOP + DONE,
             Said(("Yes.",))),
    Streamed("calls that are not numbered", CHAT,
             chunk({"tool_calls": [{"id": "call_a1", "function": {"name": "weather", "arguments": WEATHER[2]}},
                                   {"id": "call_b2", "function": {"name": "clock", "arguments": "{}"}}]})
             + chunk({}, "tool_calls") + DONE,
             Said(finish=(FinishReason.TOOL_CALLS,), calls=(WEATHER, CLOCK))),
    Streamed("calls that are not numbered, in pieces", CHAT,
             chunk({"tool_calls": [{"id": "call_a1", "function": {"name": "weather", "arguments": ""}}]})
             + chunk({"tool_calls": [{"function": {"arguments": WEATHER[2]}}]})
             + chunk({"tool_calls": [{"index": None, "id": "call_b2", "function": {"name": "clock"}}]})
             + chunk({"tool_calls": [{"id": None, "function": {"arguments": "{}"}}, {"id": "", "function": None}]})
             + chunk({}, "tool_calls") + DONE,
             Said(finish=(FinishReason.TOOL_CALLS,), calls=(WEATHER, CLOCK))),
    Streamed("calls with neither number nor id", CHAT,
             chunk({"tool_calls": [{"id": "", "function": {"name": "weather", "arguments": WEATHER[2]}}]})
             + chunk({"tool_calls": [{"function": {"name": "clock", "arguments": ""}}]})
             + chunk({"tool_calls": [{"id": "", "function": {"name": "", "arguments": "{}"}}]})
             + chunk({}, "tool_calls") + DONE,
             Said(finish=(FinishReason.TOOL_CALLS,),
                  calls=((made_up_id("chatcmpl-1 1", 0, 0), *WEATHER[1:]),
                         (made_up_id("chatcmpl-1 1", 0, 1), *CLOCK[1:])))),
    Streamed("calls out of order, and arguments as an object", CHAT,
             chunk(call_piece(1, "", id="call_b2", name="clock"))
             + chunk({"tool_calls": [{"index": 0, "id": "call_a1",
                                      "function": {"name": "weather", "arguments": {"city": "Zürich"}}}]})
             + chunk(call_piece(1, "{}")) + chunk({}, "tool_calls") + DONE,
             Said(finish=(FinishReason.TOOL_CALLS,), calls=(WEATHER, CLOCK))),
    Streamed("cut at the length", CHAT, ROLE + WORDS + chunk({}, "length") + DONE,
             Said(GREETING.text, (FinishReason.LENGTH,))),
    Streamed("withheld", CHAT, ROLE + chunk({}, "content_filter") + DONE, Said(finish=(FinishReason.CONTENT_FILTER,))),
    Streamed("a refusal", CHAT, ROLE + chunk({"refusal": "I "}) + chunk({"refusal": "can't."}) + STOP + DONE,
             Said(refusal="I can't.")),
    Streamed(
        "two tool calls at once",
        CHAT,
        ROLE
        + chunk(call_piece(0, "", id="call_a1", name="weather"))
        + chunk(call_piece(0, '{"city":'))
        + chunk(call_piece(1, "{}", id="call_b2", name="clock"))
        + chunk(call_piece(0, '"Zürich"}'))
        + chunk({}, "tool_calls")
        + DONE,
        Said(finish=(FinishReason.TOOL_CALLS,), calls=(WEATHER, CLOCK)),
    ),
    Streamed(
        "two choices in turns",
        TWO,
        ROLE
        + chunk({"role": "assistant", "content": ""}, index=1)
        + chunk({"content": "a"})
        + chunk({"content": "b"}, index=1)
        + chunk({"content": "A"})
        + STOP
        + chunk({"content": "B"}, index=1)
        + chunk({}, "length", index=1)
        + COUNT
        + DONE,
        Said(("aA", "bB"), (FinishReason.STOP, FinishReason.LENGTH), usage=COUNTED),
    ),
    Streamed("a completion", TEXT, text_chunk("upon ") + text_chunk("a time") + text_chunk("", "stop") + DONE,
             Said(("upon a time",))),
    Streamed("cut in mid-stream", CHAT, ROLE + WORDS, Said(GREETING.text, (None,)), "cut"),
    Streamed("cut inside an event", CHAT, ROLE + WORDS + STOP[:40], Said(GREETING.text, (None,)), "cut"),
    Streamed("one of two choices cut", TWO,
             ROLE + chunk({"content": "a"}) + STOP + chunk({"content": "b"}, index=1),
             Said(("a", "b"), (FinishReason.STOP, None)), "cut"),
    Streamed("nothing at all", CHAT, b"", Said(finish=(None,)), "cut"),
    Streamed("comments alone", CHAT, b": ping\n\n" * 3, Said(finish=(None,)), "cut"),
    Streamed("an HTML page", CHAT, b"<html><h1>502</h1></html>", Said(finish=(None,)), "cut"),
    Streamed("half a chunk", CHAT, ROLE + WORDS + b'data: {"id":"chatcmpl-1","cho\n\n' + STOP + DONE,
             Said(GREETING.text, (None,)), "malformed"),
    Streamed("an error in mid-stream", CHAT,
             ROLE + WORDS + event({"error": {"message": "Overloaded", "type": "server_error"}}) + STOP + DONE,
             Said(GREETING.text, (None,)), "error_frame"),
    Streamed("an error as the first event", CHAT, event({"error": {"message": "no", "code": 500}}),
             Said(finish=(None,)), "error_frame"),
    Streamed("a fault of the request in mid-stream", CHAT,
             ROLE + WORDS + event({"error": {"message": "Too slow.", "type": "invalid_request_error"}}),
             Said(GREETING.text, (None,)), "refused"),
    Streamed("vLLM's way to say so", CHAT,
             event({"error": {"message": "Too slow.", "type": "BadRequestError", "code": 400}}),
             Said(finish=(None,)), "refused"),
    Streamed("the gateway's own key refused inside a stream", CHAT,
             event({"error": {"message": "Incorrect API key provided: sk-1****9.", "type": "invalid_request_error",
                              "code": "invalid_api_key"}}),
             Said(finish=(None,)), "error_frame"),
    Streamed("the same by a number", CHAT,
             event({"error": {"message": "sk-1****9", "type": "invalid_request_error", "code": "401"}}),
             Said(finish=(None,)), "error_frame"),
    Streamed("no time left, as our own engine says it", CHAT,
             ROLE + WORDS + event({"error": {"message": "Late.", "type": "server_error", "code": "deadline_exceeded"}}),
             Said(GREETING.text, (None,)), "deadline"),
)  # fmt: skip

WHOLE = (
    Whole("text", CHAT, body(), Said(("Grüezi 🚪",), usage=COUNTED)),
    Whole("Azure's filter took all of it", CHAT,
          json.dumps({"choices": [{"index": 0, "finish_reason": "content_filter", "logprobs": None,
                                   "content_filter_results": SAFE}], "usage": USAGE}).encode(),
          Said(finish=(FinishReason.CONTENT_FILTER,), usage=COUNTED)),
    Whole("Azure's filter beside it", CHAT,
          body(prompt_filter_results=[{"prompt_index": 0, "content_filter_results": SAFE}]),
          Said(("Grüezi 🚪",), usage=COUNTED)),
    Whole("no usage", CHAT, body(usage=None), Said(("Grüezi 🚪",))),
    Whole("usage without details", CHAT, body(usage={"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}),
          Said(("Grüezi 🚪",), usage=Usage(input_tokens=3, output_tokens=2))),
    Whole("usage with empty details", CHAT,
          body(usage={"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": None,
                      "completion_tokens_details": {"reasoning_tokens": None}}),
          Said(("Grüezi 🚪",), usage=Usage(input_tokens=3, output_tokens=2))),
    Whole("more cached than asked", CHAT,
          body(usage={"prompt_tokens": 3, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 9}}),
          Said(("Grüezi 🚪",), usage=Usage(input_tokens=3, cached_input_tokens=3, output_tokens=7))),
    *(Whole(f"written to the cache: {written}", CHAT,
            body(usage={"prompt_tokens": 9, "completion_tokens": 7,
                        "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": written}}),
            Said(("Grüezi 🚪",), usage=Usage(9, 4, 7, cache_write_tokens=counted)))
      for written, counted in ((3, 3), (99, 5), (-3, 0), (None, 0))),
    Whole("counts as floats", CHAT, body(usage={"prompt_tokens": 3.0, "completion_tokens": 7.0}),
          Said(("Grüezi 🚪",), usage=Usage(input_tokens=3, output_tokens=7))),
    *(Whole(f"no count: {counts}", CHAT, body(usage=counts), Said(("Grüezi 🚪",), usage=None))
      for counts in ({}, {"prompt_tokens": 3, "completion_tokens": -7}, {"prompt_tokens": None}, {"prompt_tokens": 0},
                     {"prompt_tokens": 10**30}, {"prompt_tokens": 3, "completion_tokens": 2**31})),
    Whole("a tool call", CHAT,
          body({"content": None, "tool_calls": [
              {"id": "call_a1", "type": "function", "function": {"name": "weather", "arguments": WEATHER[2]}}]},
              "tool_calls"),
          Said(finish=(FinishReason.TOOL_CALLS,), calls=(WEATHER,), usage=COUNTED)),
    Whole("arguments as an object", CHAT,
          body({"content": None, "tool_calls": [
              {"id": "call_a1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}]},
              "tool_calls"),
          Said(finish=(FinishReason.TOOL_CALLS,), calls=(WEATHER,), usage=COUNTED)),
    Whole("calls without an id", CHAT,
          body({"content": None, "tool_calls": [
              {"id": None, "function": {"name": "weather", "arguments": WEATHER[2]}},
              {"id": "", "function": {"name": "clock", "arguments": "{}"}}]}, "tool_calls"),
          Said(finish=(FinishReason.TOOL_CALLS,), usage=COUNTED,
               calls=((made_up_id("chatcmpl-1 1", 0, 0), *WEATHER[1:]),
                      (made_up_id("chatcmpl-1 1", 0, 1), *CLOCK[1:])))),
    Whole("content in parts", CHAT, body({"content": [{"type": "text", "text": "Yes"}, {"type": "text", "text": "."}]}),
          Said(("Yes.",), usage=COUNTED)),
    Whole("a frame of strangers", CHAT, body(id=7, created=None, model=None, system_fingerprint=3),
          Said(("Grüezi 🚪",), usage=COUNTED)),
    *(Whole(f"usage that is none: {told}", CHAT, body(usage=told), Said(("Grüezi 🚪",)))
      for told in ("n/a", [], {"prompt_tokens": "12"})),
    Whole("a refusal", CHAT, body({"content": None, "refusal": "I can't."}), Said(refusal="I can't.", usage=COUNTED)),
    Whole("an older word for tools", CHAT, body(finish="function_call"),
          Said(("Grüezi 🚪",), (FinishReason.TOOL_CALLS,), usage=COUNTED)),
    Whole("no reason", CHAT, body(finish=None), Said(("Grüezi 🚪",), usage=COUNTED)),
    Whole("a stranger's word", CHAT, body(finish="eos"), Said(("Grüezi 🚪",), usage=COUNTED)),
    Whole("a completion", TEXT,
          b'{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"text":" upon a time",'
          b'"index":0,"logprobs":null,"finish_reason":"length"}],"usage":{"prompt_tokens":1,"completion_tokens":3,"total_tokens":4}}',
          Said((" upon a time",), (FinishReason.LENGTH,), usage=Usage(input_tokens=1, output_tokens=3))),
    Whole("embeddings out of order", EmbeddingRequest(model="m", input=["a", "b"]),
          b'{"object":"list","data":[{"object":"embedding","index":1,"embedding":[0.5]},{"object":"embedding","index":0,'
          b'"embedding":[0.25]}],"model":"m","usage":{"prompt_tokens":2,"total_tokens":2}}',
          Said(("[0.25]", "[0.5]"), (), usage=Usage(input_tokens=2))),
)  # fmt: skip

NONSENSE = (
    b"",
    b"null",
    b"<html>",
    b'{"object":"chat.completion"',
    b'{"error":{"message":"no"}}',
    b'{"choices":"x"}',
    b'{"choices":[{}]}',
    b'{"choices":[{"finish_reason":"stop"}]}',
)


def _failing(
    name: str, answer: tuple[int, bytes], client: int, code: str | None, moves_on: bool, outcome: str, **headers: str
) -> Failing:
    said = {key.replace("_", "-"): value for key, value in headers.items()}
    return Failing(name, answer[0], said, answer[1], client, code, moves_on, outcome)


INVALID = "invalid_request_error"
FAILING = (
    _failing("our key refused", failure(401, INVALID, "invalid_api_key"), 502, "upstream_error", True, "refused_key"),
    _failing("our account not allowed", failure(403, INVALID, "country"), 502, "upstream_error", True, "refused_key"),
    _failing("a firewall in front", (403, b"<html>403 Forbidden</html>"), 502, "upstream_error", True, "forbidden"),
    _failing("a bad request", failure(400, INVALID, "invalid_value"), 400, "invalid_value", False, "refused"),
    _failing("too long a prompt", failure(400, INVALID, "context_length_exceeded"), 400, "context_length_exceeded",
             True, "refused"),
    _failing("not processable", failure(422, INVALID, None), 400, None, False, "refused"),
    _failing("too large", failure(413, INVALID, None), 413, None, False, "refused"),
    _failing("unknown model", failure(404, INVALID, "model_not_found"), 502, "upstream_error", True, "not_found"),
    _failing("rate limit", failure(429, "requests", "rate_limit_exceeded"), 429, "rate_limit_exceeded", True,
             "rate_limited"),
    _failing("spent", failure(429, "insufficient_quota", "insufficient_quota"), 429, "rate_limit_exceeded", True,
             "spend_cap"),
    _failing("broken", failure(500, "server_error", None), 502, "upstream_error", True, "status_500"),
    _failing("an HTML page", (502, b"<html>"), 502, "upstream_error", True, "status_502"),
    _failing("overloaded", failure(503, "server_error", "slow_down"), 502, "upstream_error", True, "status_503"),
    _failing("overloaded, elsewhere", (529, b""), 502, "upstream_error", True, "status_529"),
    _failing("a 400 without sense", (400, b"\xff\xfe"), 400, None, False, "refused"),
)  # fmt: skip

OPENAI = WireFormat("openai", OpenAIFormat, STREAMED, WHOLE, NONSENSE, FAILING)
