# What the scripted upstream answers in OpenAI's Responses API: the same words as in a chat, as items with events. What
# it thinks it seals, where it is asked to; where its caller says "search", it runs each of its own tools that it may.

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

from tests.support.openai_answers import CREATED, Spoken, answer_chat
from tests.support.response_rules import SEAL
from tests.support.upstream_scripts import Script

NOT_SAID = {"id": None, "tools": [], "text": {"format": {"type": "text"}}, "metadata": {}}  # of every response
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="  # a PNG
HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp")  # tools that it runs itself
STEPS = {  # of an item of theirs, as events tell them
    "web_search_call": ("in_progress", "searching", "completed"),
    "file_search_call": ("in_progress", "searching", "completed"),
    "code_interpreter_call": ("in_progress", "interpreting", "completed"),
    "image_generation_call": ("in_progress", "generating", "completed"),
    "mcp_list_tools": ("in_progress", "completed"),
    "mcp_call": ("in_progress", "completed"),
}
INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class ResponseAnswer:
    """All that is needed to write one response, whole or streamed."""

    error_frame: ClassVar = {
        "type": "error",
        "code": "server_error",
        "message": "The server had an error.",
        "param": None,
    }
    done = b""

    def __init__(self, request: dict[str, Any], script: Script, number: int) -> None:
        chat = answer_chat(as_chat(request), script, number)
        self.spoken: list[Spoken] = chat.spoken
        self._request = request
        self._chat = chat
        self._tag = f"up{number:032x}"
        self._customs = {tool["name"] for tool in _tools(request) if tool["type"] == "custom"}
        self._namespaces = {tool["name"]: tool.get("namespace") for tool in _tools(request)}
        self._items = list(self._made())
        self._number = 0

    def whole(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        is_cut = self.spoken[0].finish in ("length", "content_filter")
        reason = {"length": "max_output_tokens"}.get(self.spoken[0].finish, self.spoken[0].finish)
        ended = {"status": "incomplete" if is_cut else "completed", "output": self._items}
        ended |= {"incomplete_details": {"reason": reason}} if is_cut else {}
        return self._response(**ended) | ({} if self._usage is None else {"usage": self._usage})

    def chunks(self) -> Iterator[tuple[dict[str, Any], bool]]:
        """Yield the events, and for each whether it carries a token."""
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response()), False
        for place, item in enumerate(self._items):
            begun = {**item, "status": "in_progress"} | {name: "" for name in ("arguments", "input") if name in item}
            begun |= {name: [] for name in ("content", "summary") if name in item}
            yield self._event("response.output_item.added", output_index=place, item=begun), False
            yield from self._of_item(place, item)
            yield self._event("response.output_item.done", output_index=place, item=item), False
        whole = self.whole()
        yield self._event(f"response.{whole['status']}", response=whole), False

    def event(self, chunk: dict[str, Any]) -> bytes:
        """Return an event as a server-sent one."""
        data = json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode()
        return b"event: %b\ndata: %b\n\n" % (chunk["type"].encode(), data)

    def is_finish(self, chunk: dict[str, Any]) -> bool:
        """Tell whether an event says why the reply ended."""
        return chunk["type"] in ("response.completed", "response.incomplete")

    def swell(self, chunk: dict[str, Any], words: str) -> None:
        """Put ``words`` in the place of an event's token."""
        chunk["delta"] = words

    def swell_whole(self, body: dict[str, Any], words: str) -> None:
        """Put ``words`` in the place of a body's."""
        for item in body["output"]:
            if item["type"] == "message":
                item["content"] = [{"type": "output_text", "text": words, "annotations": [], "logprobs": []}]

    def take_finish(self, body: dict[str, Any]) -> None:
        """Leave out that a body is whole."""
        body["status"] = "in_progress"

    @property
    def _usage(self) -> dict[str, Any] | None:
        if (told := self._chat.usage) is None:
            return None
        counts = [told[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
        usage: dict[str, Any] = dict(zip(("input_tokens", "output_tokens", "total_tokens"), counts, strict=True))
        if "prompt_tokens_details" in told:
            usage["input_tokens_details"] = told["prompt_tokens_details"]
            usage["output_tokens_details"] = told["completion_tokens_details"]
        return usage

    def _response(self, **more: Any) -> dict[str, Any]:
        said = {name: value for name, value in self._request.items() if name not in ("input", "include", "stream")}
        begun = {"id": f"resp_{self._tag}", "object": "response", "created_at": CREATED, "status": "in_progress"}
        told = {"output": [], "service_tier": self._chat.tier, "background": False, "billing": {"payer": "developer"}}
        return NOT_SAID | said | begun | {"error": None, "incomplete_details": None} | told | more

    def _made(self) -> Iterator[dict[str, Any]]:
        spoken = self.spoken[0]
        said = len(json.dumps(self._request["input"]))  # characters, as if each were a token
        if any(said > edit["compact_threshold"] for edit in self._request.get("context_management") or ()):
            ident = f"cmp_{self._tag}"
            yield {"id": ident, "type": "compaction", "encrypted_content": SEAL + ident}
        if spoken.thought is not None:
            ident = f"rs_{self._tag}"
            asks = (self._request.get("reasoning") or {}).get("summary")
            summary = [{"type": "summary_text", "text": spoken.thought}] if asks else []
            sealed = "reasoning.encrypted_content" in (self._request.get("include") or ())
            yield {"id": ident, "type": "reasoning", "summary": summary} | (
                {"encrypted_content": SEAL + ident} if sealed else {}
            )
        for tool in self._run:
            yield from hosted_items(tool, self._tag)
        if spoken.tokens:
            text, kind = "".join(spoken.tokens), "refusal" if spoken.is_refusal else "output_text"
            part = {"type": kind, "refusal": text} if spoken.is_refusal else self._text(text)
            message = {"id": f"msg_{self._tag}", "type": "message", "role": "assistant", "phase": "final_answer"}
            yield message | {"status": "completed", "content": [part]}
        for place, call in enumerate(spoken.calls):
            yield self._call(call, place)

    def _text(self, text: str) -> dict[str, Any]:
        cited = {"type": "url_citation", "url": "https://a.example", "title": "A", "start_index": 0, "end_index": 3}
        return {"type": "output_text", "text": text, "annotations": [cited] if self._run else [], "logprobs": []}

    @property
    def _run(self) -> list[dict[str, Any]]:
        tools = [tool for tool in self._request.get("tools") or () if tool["type"] in HOSTED]
        return tools if "search" in json.dumps(self._request["input"]) else []

    def _call(self, call: dict[str, Any], place: int) -> dict[str, Any]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        told = {"call_id": call["id"], "name": name, "status": "completed"}
        told |= {"namespace": space} if (space := self._namespaces.get(name)) else {}
        if name in self._customs:
            return {"id": f"ctc_{self._tag}{place}", "type": "custom_tool_call", **told} | {
                "input": json.loads(arguments)["input"]
            }
        return {"id": f"fc_{self._tag}{place}", "type": "function_call", **told, "arguments": arguments}

    def _of_item(self, place: int, item: dict[str, Any]) -> Iterator[tuple[dict[str, Any], bool]]:
        at = {"item_id": item["id"], "output_index": place}
        match item["type"]:
            case "reasoning":
                for index, part in enumerate(item["summary"]):
                    there = at | {"summary_index": index}
                    empty = {**part, "text": ""}
                    yield self._event("response.reasoning_summary_part.added", **there, part=empty), False
                    kind = "response.reasoning_summary_text"
                    yield from self._words(kind, there, "text", part["text"].split(" "), " ", has_token=False)
                    yield self._event("response.reasoning_summary_part.done", **there, part=part), False
            case "mcp_approval_request":
                pass
            case kind if kind in STEPS:
                *steps, last = STEPS[kind]
                for step in steps:
                    yield self._event(f"response.{kind}.{step}", **at), False
                for field, name in (("code", f"{kind}_code"), ("arguments", f"{kind}_arguments")):
                    if field in item:
                        yield from self._words(f"response.{name}", at, field, item[field].split(" "), " ")
                yield self._event(f"response.{kind}.{last}", **at), False
            case "message":
                [part] = item["content"]
                there, field = at | {"content_index": 0}, "refusal" if part["type"] == "refusal" else "text"
                empty = {**part, field: ""} | ({"annotations": []} if field == "text" else {})
                yield self._event("response.content_part.added", **there, part=empty), False
                kind, scores = f"response.{part['type']}", {} if field == "refusal" else {"logprobs": []}
                yield from self._words(kind, there, field, self.spoken[0].tokens, "", **scores)
                yield self._event("response.content_part.done", **there, part=part), False
            case "compaction":
                pass
            case kind:
                field = "arguments" if kind == "function_call" else "input"
                name = "function_call_arguments" if kind == "function_call" else "custom_tool_call_input"
                pieces = [item[field][start : start + 5] for start in range(0, len(item[field]), 5)]
                yield from self._words(f"response.{name}", at, field, pieces, "")

    def _words(
        self,
        kind: str,
        at: dict[str, Any],
        field: str,
        pieces: list[str],
        gap: str,
        *,
        has_token: bool = True,
        **more: Any,
    ) -> Iterator[tuple[dict[str, Any], bool]]:
        for place, piece in enumerate(pieces):
            words = f"{gap if place else ''}{piece}"
            yield self._event(f"{kind}.delta", **at, delta=words, **more, obfuscation="x7Kq2p"), has_token
        yield self._event(f"{kind}.done", **at, **{field: gap.join(pieces)}, **more), False

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}


def hosted_items(tool: dict[str, Any], tag: str) -> Iterator[dict[str, Any]]:
    """Yield the items of a run of a tool of its own: each makes one call, and code two in one container."""
    done: dict[str, Any] = {"status": "completed"}
    match tool["type"]:
        case "web_search":
            action = {"type": "search", "query": "the weather in Bern", "queries": ["the weather in Bern"]}
            yield done | {"id": f"ws_{tag}", "type": "web_search_call", "action": action}
        case "file_search":
            found = {"file_id": "file-1", "filename": "toll.md", "score": 0.9, "text": "A toll.", "attributes": {}}
            call = {"id": f"fs_{tag}", "type": "file_search_call", "queries": ["toll"], "results": [found]}
            yield done | call
        case "code_interpreter":
            for place, code in enumerate(("x = 6 * 7", "print(x)")):
                call = {"id": f"ci_{tag}{place}", "type": "code_interpreter_call", "container_id": f"cntr_{tag}"}
                yield done | call | {"code": code, "outputs": [{"type": "logs", "logs": "42"}]}
        case "image_generation":
            call = {"id": f"ig_{tag}", "type": "image_generation_call", "result": PIXEL, "action": "generate"}
            yield done | call
        case "mcp":
            label, said = tool["server_label"], {"name": "look", "arguments": '{"for": "a toll"}'}
            listed = {"name": "look", "input_schema": INPUT, "description": "Looks.", "annotations": None}
            yield {"id": f"mcpl_{tag}", "type": "mcp_list_tools", "server_label": label, "tools": [listed]}
            if tool.get("require_approval") != "never":
                yield {"id": f"mcpr_{tag}", "type": "mcp_approval_request", "server_label": label, **said}
                return
            call = {"id": f"mcp_{tag}", "type": "mcp_call", "server_label": label, "output": "A toll.", "error": None}
            yield done | call | said


def as_chat(request: dict[str, Any]) -> dict[str, Any]:
    """Return what is asked as the chat that says the same."""
    given = request["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    chat = {"model": request["model"], "messages": [_message(item) for item in items], "tools": []}
    if request.get("instructions"):
        chat["messages"].insert(0, {"role": "system", "content": request["instructions"]})
    for tool in _tools(request):
        described = {"name": tool["name"], "parameters": INPUT if tool["type"] == "custom" else tool.get("parameters")}
        chat["tools"].append({"type": "function", "function": described})
    form = (request.get("text") or {}).get("format") or {}
    if form.get("type") == "json_schema":
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
    choice = request.get("tool_choice")
    if isinstance(choice, dict) and choice["type"] in ("function", "custom"):
        chat["tool_choice"] = {"function": {"name": choice["name"]}}
    elif isinstance(choice, str):
        chat["tool_choice"] = choice
    for name, own in (("max_output_tokens", "max_tokens"), ("parallel_tool_calls",) * 2, ("service_tier",) * 2):
        if request.get(name) is not None:
            chat[own] = request[name]
    return chat


def _tools(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the tools that the caller runs."""
    for tool in request.get("tools") or ():
        if tool["type"] in ("function", "custom"):
            yield tool
        for inner in tool.get("tools") or ():
            yield inner | {"namespace": tool["name"]}


def _message(item: dict[str, Any]) -> dict[str, Any]:
    match item.get("type", "message"):
        case "message":
            parts = item["content"]
            text = parts if isinstance(parts, str) else "".join(part.get("text") or "" for part in parts)
            return {"role": item["role"], "content": text}
        case "function_call" | "custom_tool_call":
            return {"role": "assistant", "content": item.get("arguments") or item.get("input")}
        case "function_call_output" | "custom_tool_call_output":
            return {"role": "tool", "content": json.dumps(item["output"])}
    return {"role": "assistant", "content": json.dumps(item)}
