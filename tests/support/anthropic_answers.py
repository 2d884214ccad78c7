# What the scripted upstream answers in Anthropic's dialect: the same words as in OpenAI's, in Anthropic's shapes.

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

from tests.support.anthropic_rules import sign
from tests.support.openai_answers import Spoken, answer_chat, prompt_tokens
from tests.support.upstream_scripts import Script, Told

ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}
CITED = " As page one says."
SEARCHED = [
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "the weather in Bern"}},
    {
        "type": "web_search_tool_result",
        "tool_use_id": "srvtoolu_1",
        "content": [
            {"type": "web_search_result", "url": "https://a.example", "title": "A", "encrypted_content": "EqQB"}
            | {"page_age": "2 days"}
        ],
    },
]
FETCHED = [
    {"type": "server_tool_use", "id": "srvtoolu_2", "name": "web_fetch", "input": {"url": "https://a.example/p"}},
    {
        "type": "web_fetch_tool_result",
        "tool_use_id": "srvtoolu_2",
        "content": {
            "type": "web_fetch_result",
            "url": "https://a.example/p",
            "content": {
                "type": "document",
                "source": {"type": "text", "media_type": "text/plain", "data": "Two coins a gate."},
                "title": "Tolls",
                "citations": {"enabled": True},
            },
            "retrieved_at": "2026-11-28T12:00:00Z",
        },
    },
]
RAN = [
    {"type": "server_tool_use", "id": "srvtoolu_3", "name": "bash_code_execution", "input": {"command": "ls"}},
    {
        "type": "bash_code_execution_tool_result",
        "tool_use_id": "srvtoolu_3",
        "content": {
            "type": "bash_code_execution_result",
            "stdout": "tolls.csv",
            "stderr": "",
            "return_code": 0,
            "content": [{"type": "bash_code_execution_output", "file_id": "file_011"}],
        },
    },
]
CONTAINER = {"id": "container_011", "expires_at": "2026-12-28T12:00:00Z"}
# What tools that it runs itself say, by their types.
HOSTED = {"web_search_20250305": SEARCHED, "web_fetch_20250910": FETCHED, "code_execution_20250825": RAN}
FOUND_TOKENS = 3_000  # that a search adds to the prompt
STOP_DETAILS = {"type": "refusal", "category": "bio", "explanation": None}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


class AnthropicAnswer:
    """All that is needed to write one message, whole or streamed."""

    error_frame: ClassVar = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    done = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

    def __init__(self, request: dict[str, Any], spoken: Spoken, usage: dict[str, Any] | None, ident: str) -> None:
        self.spoken = [spoken]
        self._request = request
        self._usage = usage
        self._id = ident

    def whole(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        content = [{"type": "tool_use", **call} for call in self._calls()]
        if self.spoken[0].tokens:
            content.insert(0, {"type": "text", "text": "".join(self.spoken[0].tokens)})
        if self._citation is not None:
            content.insert(1, {"type": "text", "text": CITED, "citations": [self._citation]})
        content[:0] = self._searched
        if (thought := self.spoken[0].thought) is not None:
            content.insert(0, {"type": "thinking", "thinking": thought, "signature": sign(thought)})
        return self._frame(content, self._stop(), self._usage)

    def chunks(self) -> Iterator[tuple[dict[str, Any], bool]]:
        """Yield the events before message_stop, and for each whether it carries a token."""
        prompt = None if self._usage is None else {**self._usage, "output_tokens": 1}
        begun = {"stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": self._frame([], begun, prompt)}, False
        yield {"type": "ping"}, False
        index = 0
        if (thought := self.spoken[0].thought) is not None:
            yield from self._thinking(thought)
            index += 1
        for block in self._searched:
            pieces = [json.dumps(block["input"])] if "input" in block else []
            head = block | {"input": {}} if "input" in block else block
            yield from self._block(index, head, "input_json_delta", "partial_json", pieces)
            index += 1
        if self.spoken[0].tokens:
            yield from self._block(index, {"type": "text", "text": ""}, "text_delta", "text", self.spoken[0].tokens)
            index += 1
        if self._citation is not None:
            yield from self._cited(index)
            index += 1
        for call in self._calls():
            arguments = json.dumps(call["input"], ensure_ascii=False) if call["input"] else ""
            pieces = ["", *(arguments[place : place + 5] for place in range(0, len(arguments), 5))]
            head = {"type": "tool_use", **call, "input": {}}
            yield from self._block(index, head, "input_json_delta", "partial_json", pieces)
            index += 1
        usage = {} if self._usage is None else {"usage": self._usage}
        yield {"type": "message_delta", "delta": self._stop(), **usage, **self._edited()}, False

    def event(self, chunk: dict[str, Any]) -> bytes:
        """Return an event with its name."""
        data = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
        return f"event: {chunk['type']}\ndata: {data}\n\n".encode()

    def is_finish(self, chunk: dict[str, Any]) -> bool:
        """Tell whether an event says why the reply ended."""
        return bool(chunk["type"] == "message_delta")

    def swell(self, chunk: dict[str, Any], words: str) -> None:
        """Put ``words`` in the place of an event's token."""
        if chunk["type"] == "content_block_delta":
            chunk["delta"] = {"type": "text_delta", "text": words}

    def swell_whole(self, body: dict[str, Any], words: str) -> None:
        """Put ``words`` in the place of a body's."""
        body["content"] = [{"type": "text", "text": words}]

    def take_finish(self, body: dict[str, Any]) -> None:
        """Leave out why a body's reply ended."""
        del body["stop_reason"]

    def _frame(self, content: list[Any], stop: dict[str, Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        frame = {"id": self._id, "type": "message", "role": "assistant", "model": self._request["model"]}
        frame |= {"content": content, **stop} | (self._edited() if stop["stop_reason"] else {})
        if stop["stop_reason"] and any(block in content for block in RAN):
            frame["container"] = CONTAINER
        return frame if usage is None else {**frame, "usage": usage}

    def _stop(self) -> dict[str, Any]:
        spoken = self.spoken[0]
        if spoken.stopped_by is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": spoken.stopped_by}
        why = {"stop_reason": STOP_REASONS[spoken.finish], "stop_sequence": None}
        return why | ({"stop_details": STOP_DETAILS} if spoken.finish == "content_filter" else {})

    def _edited(self) -> dict[str, Any]:
        asked = self._request.get("context_management")
        return {"context_management": {"applied_edits": asked["edits"]}} if asked else {}

    @property
    def _citation(self) -> dict[str, Any] | None:
        """What the answer rests on, where it was asked to say so."""
        for turn in self._request["messages"]:
            for block in turn["content"] if isinstance(turn["content"], list) else ():
                if (block.get("citations") or {}) and block["type"] == "document" and block["citations"]["enabled"]:
                    place = {"document_index": 0, "document_title": block.get("title")}
                    return place | {"type": "page_location", "cited_text": CITED, "start_page_number": 1}
        return None

    @property
    def _searched(self) -> list[dict[str, Any]]:
        """What tools that it runs itself said, of each that the request has."""
        tools = self._request.get("tools") or ()
        return [block for tool in tools for block in HOSTED.get(tool.get("type"), ())]

    def _cited(self, index: int) -> Iterator[tuple[dict[str, Any], bool]]:
        head = {"type": "text", "text": "", "citations": []}
        yield {"type": "content_block_start", "index": index, "content_block": head}, False
        delta: dict[str, Any] = {"type": "citations_delta", "citation": self._citation}
        yield {"type": "content_block_delta", "index": index, "delta": delta}, False
        delta = {"type": "text_delta", "text": CITED}
        yield {"type": "content_block_delta", "index": index, "delta": delta}, True
        yield {"type": "content_block_stop", "index": index}, False

    def _thinking(self, thought: str) -> Iterator[tuple[dict[str, Any], bool]]:
        block = {"type": "thinking", "thinking": "", "signature": ""}
        yield {"type": "content_block_start", "index": 0, "content_block": block}, False
        for place in range(0, len(thought), 5):
            delta = {"type": "thinking_delta", "thinking": thought[place : place + 5]}
            yield {"type": "content_block_delta", "index": 0, "delta": delta}, False
        delta = {"type": "signature_delta", "signature": sign(thought)}
        yield {"type": "content_block_delta", "index": 0, "delta": delta}, False
        yield {"type": "content_block_stop", "index": 0}, False

    def _calls(self) -> list[dict[str, Any]]:
        return [
            {
                "id": call["id"],
                "name": call["function"]["name"],
                "input": json.loads(call["function"]["arguments"]),
            }
            for call in self.spoken[0].calls
        ]

    def _block(
        self, index: int, head: dict[str, Any], kind: str, field: str, pieces: list[str]
    ) -> Iterator[tuple[dict[str, Any], bool]]:
        yield {"type": "content_block_start", "index": index, "content_block": head}, False
        for piece in pieces:
            yield {"type": "content_block_delta", "index": index, "delta": {"type": kind, field: piece}}, bool(piece)
        yield {"type": "content_block_stop", "index": index}, False


def answer_message(request: dict[str, Any], script: Script, number: int) -> AnthropicAnswer:
    """Return the answer to POST /v1/messages: what the chat of the same words would be answered."""
    chat = answer_chat(_as_chat(request), script, number)
    usage = None
    if chat.usage is not None:
        prompt = chat.usage["prompt_tokens"]
        cached = 0 if script.usage is Told.WRONG else script.cached_tokens
        usage = {
            "input_tokens": prompt - cached - script.cache_write_tokens,
            "cache_creation_input_tokens": script.cache_write_tokens,
            "cache_read_input_tokens": cached,
            "cache_creation": {
                "ephemeral_5m_input_tokens": script.cache_write_tokens,
                "ephemeral_1h_input_tokens": 0,
            },
            "output_tokens": chat.usage["completion_tokens"],
            "service_tier": "standard",
        }
        kinds = [tool.get("type") for tool in request.get("tools") or ()]
        if not HOSTED.keys().isdisjoint(kinds):
            usage["input_tokens"] = 2 * usage["input_tokens"] + FOUND_TOKENS
            names = {"web_search_20250305": "web_search_requests", "web_fetch_20250910": "web_fetch_requests"}
            usage["server_tool_use"] = {name: 1 for kind, name in names.items() if kind in kinds}
    return AnthropicAnswer(request, chat.spoken[0], usage, f"msg_{chat.id[9:]}")


def count_prompt(request: dict[str, Any]) -> int:
    """Return what POST /v1/messages/count_tokens answers: what the same message is charged for."""
    return prompt_tokens(_as_chat({"max_tokens": 1, **request}))


def error_body(status: int, message: str, code: str | None) -> dict[str, Any]:
    """Return Anthropic's error object."""
    error: dict[str, Any] = {"type": ERRORS.get(status, "api_error"), "message": message}
    if code == "insufficient_quota":
        error["details"] = {"error_code": "enforced_spend_limit_reached"}
    return {"type": "error", "error": error, "request_id": "req_scripted"}


def _as_chat(request: dict[str, Any]) -> dict[str, Any]:
    """Return about the chat that a request for a message stands for, as far as answers and counts depend on it."""
    messages = []
    system = request.get("system") or []
    for block in [{"type": "text", "text": system}] if isinstance(system, str) else system:
        messages.append({"role": "system", "content": block["text"]})
    for turn in request["messages"]:
        blocks = [{"type": "text", "text": turn["content"]}] if isinstance(turn["content"], str) else turn["content"]
        words = [{"type": "text", "text": block.get("text") or json.dumps(block)} for block in blocks]
        messages.append({"role": turn["role"], "content": words})
    chat: dict[str, Any] = {"model": request["model"], "messages": messages, "max_tokens": request["max_tokens"]}
    chat |= {"stop": request.get("stop_sequences")}
    if form := (request.get("output_config") or {}).get("format"):
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
    if tools := request.get("tools"):
        chat["tools"] = [
            {"function": {"name": tool["name"], "parameters": tool.get("input_schema", {})}}
            for tool in tools
            if tool.get("type") not in HOSTED
        ]
        chat["tool_choice"] = _as_tool_choice(request.get("tool_choice") or {"type": "auto"})
        chat["parallel_tool_calls"] = not (request.get("tool_choice") or {}).get("disable_parallel_tool_use", False)
    return chat


def _as_tool_choice(choice: dict[str, Any]) -> Any:
    named = {"function": {"name": choice.get("name")}}
    return {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice["type"]]
