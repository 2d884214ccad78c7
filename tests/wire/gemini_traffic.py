# Traffic of Gemini's generateContent, written down by Google's pages and by answers that public repositories show.

from __future__ import annotations

import json
from hashlib import blake2s, sha256
from typing import Any

from msgspec.structs import replace

from gateway.upstreams.gemini.wire_format import GeminiFormat
from protocol.chat import FinishReason, Function, Tool
from protocol.embeddings import EmbeddingRequest
from protocol.usage import Usage
from tests.wire.traffic import CHAT, Failing, Said, Streamed, Whole, WireFormat

PROMPT = {"promptTokenCount": 1200, "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 1200}]}
USAGE = {**PROMPT, "cachedContentTokenCount": 1024, "candidatesTokenCount": 26, "thoughtsTokenCount": 64}
USAGE |= {"totalTokenCount": 1290, "serviceTier": "standard"}
COUNTED = Usage(input_tokens=1200, cached_input_tokens=1024, output_tokens=90, reasoning_tokens=64)
TOOLS = replace(CHAT, tools=(Tool(Function("weather")), Tool(Function("clock"))))
ONE_CALL = replace(TOOLS, parallel_tool_calls=False)
ODD = replace(CHAT, tools=(Tool(Function("städte wetter")),))
SAFE = "_st_dte_wetter_" + sha256("städte wetter".encode()).hexdigest()[:16]
WEATHER = ("fc-1", "weather", '{"city":"Zürich"}')


def made_up(place: int, reply: str = "r-1") -> str:
    return "call_" + blake2s(f"{reply} {place}".encode(), digest_size=12).hexdigest()


CLOCK = (made_up(1), "clock", "{}")


def answer(*parts: Any, finish: str | None = None, usage: Any = None, **more: Any) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"parts": [*parts], "role": "model"}, "index": 0}
    candidate |= {"finishReason": finish} if finish else {}
    told = {} if usage is None else {"usageMetadata": usage}
    return {"candidates": [candidate], **told, "modelVersion": "gemini-3-flash", "responseId": "r-1", **more}


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\r\n\r\n"


def piece(*parts: Any, **more: Any) -> bytes:
    return event(answer(*parts, **more))


def text(words: str) -> dict[str, Any]:
    return {"text": words}


def body(*parts: Any, finish: str | None = "STOP", usage: Any = USAGE, **more: Any) -> bytes:
    return json.dumps(answer(*parts, finish=finish, usage=usage, **more), indent=2).encode()


def failure(
    status: int, kind: str, message: str = "What upstream says.", *details: dict[str, Any]
) -> tuple[int, bytes]:
    error = {"code": status, "message": message, "status": kind, "details": [*details]}
    return status, json.dumps({"error": error}, indent=2).encode()


def retry(delay: str) -> dict[str, Any]:
    return {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": delay}


THOUGHT = {"text": "Hm.", "thought": True}
CALL = {"functionCall": {"id": "fc-1", "name": "weather", "args": {"city": "Zürich"}}, "thoughtSignature": "EqQB"}
NO_ID = {"functionCall": {"name": "clock"}}
WORDS = piece(text("Grü"), usage=PROMPT) + piece(text("ezi 東"), usage=PROMPT) + piece(text("京 🚪"), usage=PROMPT)
STOP = piece(text(""), finish="STOP", usage=USAGE)
GREETING = Said(("Grüezi 東京 🚪",), usage=COUNTED)
CALLED = Said(finish=(FinishReason.TOOL_CALLS,), calls=(WEATHER, CLOCK), usage=COUNTED)
BLOCKED = {"promptFeedback": {"blockReason": "PROHIBITED_CONTENT", "safetyRatings": []}, "usageMetadata": PROMPT}

STREAMED = (
    Streamed("text with usage", CHAT, WORDS + STOP, GREETING),
    Streamed("calls", TOOLS, piece(THOUGHT) + piece(CALL) + piece(NO_ID) + STOP, CALLED),
    Streamed("words and the reason in one", CHAT, piece(text("Yes."), finish="STOP", usage=USAGE),
             Said(("Yes.",), usage=COUNTED)),
    Streamed("no usage", CHAT, piece(text("Yes."), finish="STOP"), Said(("Yes.",))),
    Streamed("plain line ends, comments", CHAT, (b": hi\n\n" + WORDS + STOP).replace(b"\r\n", b"\n"), GREETING),
    Streamed("calls at once", TOOLS, piece(CALL, NO_ID, finish="STOP", usage=USAGE), CALLED),
    Streamed("more calls than are wanted", ONE_CALL, piece(CALL, NO_ID) + STOP,
             Said(finish=(FinishReason.TOOL_CALLS,), calls=(WEATHER,), usage=COUNTED)),
    Streamed("a function of another alphabet", ODD, piece({"functionCall": {"id": "fc-1", "name": SAFE}}) + STOP,
             Said(finish=(FinishReason.TOOL_CALLS,), calls=(("fc-1", "städte wetter", "{}"),), usage=COUNTED)),
    Streamed("cut at the length", CHAT, WORDS + piece(finish="MAX_TOKENS", usage=USAGE),
             Said(GREETING.text, (FinishReason.LENGTH,), usage=COUNTED)),
    *(Streamed(f"withheld: {why}", CHAT, WORDS + event({"candidates": [{"finishReason": why}], "usageMetadata": USAGE}),
               Said(GREETING.text, (FinishReason.CONTENT_FILTER,), usage=COUNTED))
      for why in ("SAFETY", "RECITATION", "PROHIBITED_CONTENT", "BLOCKLIST", "SPII")),
    Streamed("nothing for what is left out", CHAT,
             event({"candidates": None}) + event({"candidates": [{"content": None}]})
             + event({"candidates": [{"content": {"role": "model"}}], "promptFeedback": None, "error": None})
             + WORDS + STOP, GREETING),
    Streamed("a stranger's word", CHAT, WORDS + piece(finish="DONE_FOR_GOOD", usage=USAGE), GREETING),
    Streamed("tokens of a tool's results", CHAT,
             WORDS + piece(finish="STOP", usage=USAGE | {"toolUsePromptTokenCount": 5}),
             Said(GREETING.text, usage=replace(COUNTED, input_tokens=1205))),
    Streamed("thought, and nothing said", CHAT,
             piece(THOUGHT) + piece(finish="MAX_TOKENS", usage=PROMPT | {"thoughtsTokenCount": 7}),
             Said(finish=(FinishReason.LENGTH,),
                  usage=Usage(input_tokens=1200, output_tokens=7, reasoning_tokens=7))),
    Streamed("withheld, and nothing said", CHAT, piece(finish="SAFETY", usage=PROMPT),
             Said(finish=(FinishReason.CONTENT_FILTER,), usage=Usage(input_tokens=1200))),
    *(Streamed(f"usage that is none: {told}", CHAT, WORDS + piece(finish="STOP", usage=told), Said(GREETING.text))
      for told in ("n/a", [], 7, {"promptTokenCount": "12"}, {"promptTokenCount": 3, "candidatesTokenCount": -1})),
    Streamed("a malformed call", TOOLS, WORDS + piece(finish="MALFORMED_FUNCTION_CALL", usage=USAGE),
             Said(GREETING.text, (None,)), "malformed"),
    Streamed("a prompt that is blocked", CHAT, event(BLOCKED), Said(finish=(None,)), "filtered"),
    Streamed("cut in mid-stream", CHAT, WORDS, Said(GREETING.text, (None,)), "cut"),
    Streamed("cut inside an event", CHAT, WORDS + STOP[:40], Said(GREETING.text, (None,)), "cut"),
    Streamed("nothing at all", CHAT, b"", Said(finish=(None,)), "cut"),
    Streamed("an HTML page", CHAT, b"<html><h1>502</h1></html>", Said(finish=(None,)), "cut"),
    Streamed("half a piece", CHAT, WORDS + b'data: {"candidates":[{"con\n\n' + STOP, Said(GREETING.text, (None,)),
             "malformed"),
    Streamed("an error in mid-stream", CHAT, WORDS + b"data: " + failure(503, "UNAVAILABLE")[1].replace(b"\n", b" ")
             + b"\n\n" + STOP, Said(GREETING.text, (None,)), "error_frame"),
)  # fmt: skip

WHOLE = (
    Whole("text", CHAT, body(text("Grüezi "), text("🚪")), Said(("Grüezi 🚪",), usage=COUNTED)),
    Whole("thoughts", CHAT, body(THOUGHT, text("Yes.")), Said(("Yes.",), usage=COUNTED)),
    Whole("calls", TOOLS, body(THOUGHT, CALL, NO_ID), CALLED),
    Whole("more calls than are wanted", ONE_CALL, body(CALL, NO_ID), replace(CALLED, calls=(WEATHER,))),
    Whole("words before a call", TOOLS, body(text("Let me see."), CALL, NO_ID), replace(CALLED, text=("Let me see.",))),
    Whole("a function of another alphabet", ODD, body({"functionCall": {"id": "a", "name": SAFE, "args": {"a": 1}}}),
          Said(finish=(FinishReason.TOOL_CALLS,), calls=(("a", "städte wetter", '{"a":1}'),), usage=COUNTED)),
    Whole("the length, before a word", CHAT, body(finish="MAX_TOKENS"),
          Said(finish=(FinishReason.LENGTH,), usage=COUNTED)),
    Whole("withheld, without content", CHAT,
          json.dumps({"candidates": [{"finishReason": "SAFETY", "index": 0}], "usageMetadata": USAGE}).encode(),
          Said(finish=(FinishReason.CONTENT_FILTER,), usage=COUNTED)),
    Whole("withheld, and only the prompt counted", CHAT, body(finish="SAFETY", usage=PROMPT),
          Said(finish=(FinishReason.CONTENT_FILTER,), usage=Usage(input_tokens=1200))),
    Whole("a frame of strangers", CHAT, body(text("Yes."), responseId=7, modelVersion=None, createTime=[]),
          Said(("Yes.",), usage=COUNTED)),
    Whole("no usage", CHAT, body(text("Yes."), usage=None), Said(("Yes.",))),
    Whole("more cached than asked", CHAT,
          body(text("Yes."), usage={"promptTokenCount": 3, "candidatesTokenCount": 7, "cachedContentTokenCount": 9}),
          Said(("Yes.",), usage=Usage(input_tokens=3, cached_input_tokens=3, output_tokens=7))),
    Whole("vectors", EmbeddingRequest(model="m", input=["a", "b"]),
          b'{"embeddings":[{"values":[0.25]},{"values":[0.5]}],"usageMetadata":{"promptTokenCount":2}}',
          Said(("[0.25]", "[0.5]"), (), usage=Usage(input_tokens=2))),
    Whole("vectors, and no usage", EmbeddingRequest(model="m", input="a"), b'{"embeddings":[{"values":[1]}]}',
          Said(("[1.0]",), ())),
    Whole("no reason", CHAT, body(text("Yes."), finish=None), Said(("Yes.",), usage=COUNTED)),
)  # fmt: skip

NONSENSE = (b"", b"null", b"<html>", b"{}", b'{"candidates":[]}', b'{"candidates":"x"}', b'{"error":{"message":"no"}}',
            body(finish="MALFORMED_FUNCTION_CALL"))  # fmt: skip


def _failing(
    name: str, answer: tuple[int, bytes], client: int, code: str | None, moves_on: bool, outcome: str
) -> Failing:
    return Failing(name, answer[0], {}, answer[1], client, code, moves_on, outcome)


INVALID = "INVALID_ARGUMENT"
KEY = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "API_KEY_INVALID", "domain": "googleapis.com"}
NOT_VALID = "API key not valid. Please pass a valid API key."
COUNTRY = "User location is not supported for the API use."
LONG = "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576)."
FAILING = (
    _failing("our key refused", failure(400, INVALID, NOT_VALID, KEY), 502, "upstream_error", True, "refused_key"),
    _failing("our key, by words", failure(400, INVALID, NOT_VALID), 502, "upstream_error", True, "refused_key"),
    _failing("our key expired", failure(400, INVALID, "API key expired. Please renew the API key."), 502,
             "upstream_error", True, "refused_key"),
    _failing("our country", failure(400, "FAILED_PRECONDITION", COUNTRY), 502, "upstream_error", True, "refused_key"),
    _failing("our token", failure(401, "UNAUTHENTICATED"), 502, "upstream_error", True, "refused_key"),
    _failing("our account not allowed", failure(403, "PERMISSION_DENIED"), 502, "upstream_error", True, "refused_key"),
    _failing("a bad request", failure(400, INVALID), 400, None, False, "refused"),
    _failing("a caller's words of keys", failure(400, INVALID, f"{'x' * 40} {NOT_VALID}"), 400, None, False, "refused"),
    _failing("too long a prompt", failure(400, INVALID, LONG), 400, "context_length_exceeded", True, "refused"),
    _failing("unknown model", failure(404, "NOT_FOUND"), 502, "upstream_error", True, "not_found"),
    _failing("rate limit", failure(429, "RESOURCE_EXHAUSTED", "Quota", retry("34.07s")), 429, "rate_limit_exceeded",
             True, "rate_limited"),
    _failing("broken", failure(500, "INTERNAL"), 502, "upstream_error", True, "status_500"),
    _failing("overloaded", failure(503, "UNAVAILABLE", "Overloaded.", retry("2s")), 502, "upstream_error", True,
             "overloaded"),
    _failing("too slow", failure(504, "DEADLINE_EXCEEDED"), 502, "upstream_error", True, "status_504"),
    _failing("an HTML page", (502, b"<html>"), 502, "upstream_error", True, "status_502"),
    _failing("in a list", (429, b"[" + failure(429, "RESOURCE_EXHAUSTED")[1] + b"\n]\n"), 429, "rate_limit_exceeded",
             True, "rate_limited"),
    _failing("a 400 without sense", (400, b"\xff\xfe"), 400, None, False, "refused"),
)  # fmt: skip

GEMINI = WireFormat("gemini", GeminiFormat, STREAMED, WHOLE, NONSENSE, FAILING)
