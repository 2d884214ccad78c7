# Traffic of OpenAI's Responses API, and of services that speak it a little differently, written down by its reference.

from __future__ import annotations

import json
from typing import Any

from msgspec.structs import replace

from gateway.upstreams.responses.wire_format import ResponsesFormat
from protocol.chat import FinishReason
from protocol.usage import Usage
from tests.wire.openai_traffic import FAILING
from tests.wire.traffic import CHAT, Said, Streamed, Whole, WireFormat

USAGE = {
    "input_tokens": 1200,
    "input_tokens_details": {"cached_tokens": 1024},
    "output_tokens": 90,
    "output_tokens_details": {"reasoning_tokens": 64},
    "total_tokens": 1290,
}
COUNTED = Usage(input_tokens=1200, cached_input_tokens=1024, output_tokens=90, reasoning_tokens=64)
THOUGHT = {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": "gAAAAABo=="}
WORDS = "Grüezi 東京 🚪"
PART = {"type": "output_text", "text": WORDS, "annotations": [], "logprobs": []}
MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [PART]}
NO = {"type": "refusal", "refusal": "I can't."}
REFUSED = MESSAGE | {"content": [NO]}
ARGUMENTS = '{"city":"Zürich"}'
CALL = {"id": "fc_1", "type": "function_call", "call_id": "call_a", "name": "weather", "arguments": ARGUMENTS}
PATCH = {"id": "ctc_1", "type": "custom_tool_call", "call_id": "call_b", "name": "apply_patch", "input": "*** Begin"}
SEARCH = {"id": "ws_1", "type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "toll"}}
PAGE = SEARCH | {"id": "ws_2", "action": {"type": "open_page", "url": "https://a.example"}}
FILES = {"id": "fs_1", "type": "file_search_call", "status": "completed", "queries": ["toll"], "results": None}
CODE = {"id": "ci_1", "type": "code_interpreter_call", "code": "1", "container_id": "cntr_1", "status": "completed"}
MORE_CODE = CODE | {"id": "ci_2", "code": "x = 2"}
PICTURE = {"id": "ig_1", "type": "image_generation_call", "status": "generating", "result": "iVBORw0K"}
NO_PICTURE = PICTURE | {"id": "ig_2", "status": "failed", "result": None}
SERVER = {"id": "mcp_1", "type": "mcp_call", "server_label": "a", "name": "look", "arguments": "{}", "output": "A."}
RUN = (FILES, CODE, MORE_CODE, PICTURE, NO_PICTURE, SERVER)
USED = Usage(1200, 1024, 90, 64, file_searches=1, containers=1, images=1)
GREETING = Said((WORDS,), usage=COUNTED)
CALLED = ("call_a", "weather", ARGUMENTS)
PATCHED = ("call_b", "apply_patch", "*** Begin")


def event(kind: str, **fields: Any) -> bytes:
    told = {"type": f"response.{kind}", "sequence_number": 3, **fields}
    data = json.dumps(told, ensure_ascii=False, separators=(",", ":"))
    return f"event: response.{kind}\ndata: {data}\n\n".encode()


def response(*output: dict[str, Any], **more: Any) -> dict[str, Any]:
    told = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "status": "completed"}
    return told | {"output": list(output), "usage": USAGE, "service_tier": "default"} | more


def begun(item: dict[str, Any], place: int = 0) -> bytes:
    empty = {
        name: [] if isinstance(item[name], list) else "" for name in ("content", "arguments", "input") if name in item
    }
    return event("output_item.added", output_index=place, item=item | empty)


def pieces(kind: str, words: list[str], place: int = 0) -> bytes:
    return b"".join(
        event(f"{kind}.delta", output_index=place, item_id="x", delta=word, obfuscation="x") for word in words
    )


def whole_item(item: dict[str, Any], place: int = 0) -> bytes:
    return event("output_item.done", output_index=place, item=item)


def end(*output: dict[str, Any], kind: str = "completed", **more: Any) -> bytes:
    return event(kind, response=response(*output, status=kind, **more))


HEAD = event("created", response={"id": "resp_1"}) + event("in_progress", response={})
SPOKEN = pieces("output_text", ["Grü", "ezi 東", "京 🚪"])
FULL = {"reason": "max_output_tokens"}

STREAMED = (
    Streamed("text", CHAT, HEAD + begun(MESSAGE) + SPOKEN + whole_item(MESSAGE) + end(MESSAGE), GREETING),
    Streamed("no usage", CHAT, HEAD + SPOKEN + end(MESSAGE, usage=None), Said((WORDS,))),
    Streamed("a count that is none", CHAT, HEAD + SPOKEN + end(MESSAGE, usage={"input_tokens": -1}), Said((WORDS,))),
    Streamed("[DONE] behind the end", CHAT, HEAD + SPOKEN + end(MESSAGE) + b"data: [DONE]\n\n", GREETING),
    Streamed("words at the end alone", CHAT, HEAD + end(MESSAGE), GREETING),
    Streamed("words with their item alone", CHAT, HEAD + begun(MESSAGE) + whole_item(MESSAGE) + end(), GREETING),
    Streamed(
        "thinking sealed, then words",
        CHAT,
        HEAD + begun(THOUGHT) + whole_item(THOUGHT) + pieces("output_text", [WORDS], 1) + end(THOUGHT, MESSAGE),
        GREETING,
    ),
    Streamed(
        "refusal",
        CHAT,
        HEAD + pieces("refusal", ["I ", "can't."]) + end(REFUSED),
        Said(refusal="I can't.", usage=COUNTED),
    ),
    Streamed(
        "a call and a patch",
        CHAT,
        HEAD
        + begun(CALL)
        + pieces("function_call_arguments", [ARGUMENTS[:5], ARGUMENTS[5:]])
        + whole_item(CALL)
        + begun(PATCH, 1)
        + pieces("custom_tool_call_input", ["*** ", "Begin"], 1)
        + whole_item(PATCH, 1)
        + end(CALL, PATCH),
        Said(finish=(FinishReason.TOOL_CALLS,), calls=(CALLED, PATCHED), usage=COUNTED),
    ),
    Streamed(
        "a call without pieces",
        CHAT,
        HEAD + begun(CALL) + whole_item(CALL) + end(CALL),
        Said(finish=(FinishReason.TOOL_CALLS,), calls=(CALLED,), usage=COUNTED),
    ),
    Streamed(
        "a search of the web",
        CHAT,
        HEAD
        + whole_item(SEARCH)
        + whole_item(PAGE, 1)
        + pieces("output_text", [WORDS], 2)
        + end(SEARCH, PAGE, MESSAGE),
        Said((WORDS,), usage=Usage(1200, 1024, 90, 64, web_searches=1)),
    ),
    Streamed(
        "every other tool that it runs",
        CHAT,
        HEAD
        + b"".join(whole_item(item, place) for place, item in enumerate(RUN))
        + pieces("output_text", [WORDS], len(RUN))
        + end(*RUN, MESSAGE),
        Said((WORDS,), usage=USED),
    ),
    Streamed(
        "code, and what a server is asked",
        CHAT,
        HEAD
        + pieces("code_interpreter_call_code", ["x ", "= 2"])
        + event("code_interpreter_call_code.done", output_index=0, item_id="x", code="x = 2")
        + whole_item(MORE_CODE)
        + pieces("mcp_call_arguments", ["{}"], 1)
        + event("mcp_call_arguments.done", output_index=1, item_id="x", arguments="{}")
        + whole_item(SERVER, 1)
        + end(MORE_CODE, SERVER),
        Said(("x = 2{}",), usage=replace(COUNTED, containers=1)),
    ),
    Streamed(
        "cut short",
        CHAT,
        HEAD + SPOKEN + end(MESSAGE, kind="incomplete", incomplete_details=FULL),
        Said((WORDS,), (FinishReason.LENGTH,), usage=COUNTED),
    ),
    Streamed(
        "filtered",
        CHAT,
        HEAD + SPOKEN + end(MESSAGE, kind="incomplete", incomplete_details={"reason": "content_filter"}),
        Said((WORDS,), (FinishReason.CONTENT_FILTER,), usage=COUNTED),
    ),
    Streamed(
        "an event of tomorrow", CHAT, HEAD + event("moon.phase", phase={"a": [1]}) + SPOKEN + end(MESSAGE), GREETING
    ),
    Streamed("no end", CHAT, HEAD + SPOKEN, Said((WORDS,), (None,)), "cut"),
    Streamed("[DONE] without an end", CHAT, HEAD + SPOKEN + b"data: [DONE]\n\n", Said((WORDS,), (None,)), "cut"),
    Streamed(
        "an error",
        CHAT,
        HEAD + SPOKEN + b'data: {"type":"error","code":"server_error","message":"Oh."}\n\n',
        Said((WORDS,), (None,)),
        "error_frame",
    ),
    Streamed(
        "failed",
        CHAT,
        HEAD + SPOKEN + end(kind="failed", error={"code": "server_error", "message": "Oh."}),
        Said((WORDS,), (None,)),
        "error_frame",
    ),
    Streamed("half an event", CHAT, HEAD + SPOKEN + SPOKEN[:60] + b"\n\n", Said((WORDS,), (None,)), "malformed"),
)


def body(*output: dict[str, Any], **more: Any) -> bytes:
    return json.dumps(response(*output, **more), ensure_ascii=False).encode()


RESPONSES = WireFormat(
    name="responses",
    make=ResponsesFormat,
    streamed=STREAMED,
    whole=(
        Whole("text", CHAT, body(THOUGHT, MESSAGE), GREETING),
        Whole("no usage", CHAT, body(MESSAGE, usage=None), Said((WORDS,))),
        Whole("refusal", CHAT, body(REFUSED), Said(refusal="I can't.", usage=COUNTED)),
        Whole(
            "a call and a patch",
            CHAT,
            body(CALL, PATCH),
            Said(finish=(FinishReason.TOOL_CALLS,), calls=(CALLED, PATCHED), usage=COUNTED),
        ),
        Whole(
            "a search",
            CHAT,
            body(SEARCH, PAGE, MESSAGE),
            Said((WORDS,), usage=Usage(1200, 1024, 90, 64, web_searches=1)),
        ),
        Whole("every other tool that it runs", CHAT, body(*RUN, MESSAGE), Said((WORDS,), usage=USED)),
        Whole(
            "cut short",
            CHAT,
            body(MESSAGE, status="incomplete", incomplete_details=FULL),
            Said((WORDS,), (FinishReason.LENGTH,), usage=COUNTED),
        ),
        Whole("nothing said", CHAT, body(THOUGHT), Said(usage=COUNTED)),
    ),
    nonsense=(
        b"<html>",
        b"[]",
        b"{}",
        b'{"output": 7}',
        b'{"output": [[]]}',
        body(MESSAGE, status="queued"),
        body(error={"code": "server_error", "message": "Oh."}, status="failed"),
        body(CALL | {"arguments": {}}),
    ),
    failing=FAILING,
)
