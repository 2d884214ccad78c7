# Replies in the shapes of OpenAI's Responses API: one response, or a stream of numbered events that build it; and a
# conversation made shorter.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from billing.core.money import to_text
from gateway.calls.as_events import events_of
from gateway.calls.hooks import Ending
from gateway.dialects.endpoint import ReplyFacts, WholeWriter
from gateway.dialects.parts.native_items import NativeItems
from gateway.dialects.parts.output_items import OutputItems, told_item
from protocol.chat import ChatReply, FinishReason
from protocol.errors import ServiceError
from protocol.events import Delta, Event, ReplyEnd, UsageReport
from protocol.inference import WholeReply
from protocol.response_tools import offered_tools
from protocol.responses import Compaction, ReasoningConfig, ResponsesRequest, ResponsesTool, TextConfig
from protocol.sse import encode_event
from protocol.usage import Usage

# Why a response is not complete, by why the reply ended.
INCOMPLETE = {FinishReason.LENGTH: "max_output_tokens", FinishReason.CONTENT_FILTER: "content_filter"}


class ResponsesWriter:
    """Writes responses and their events. One object per call."""

    def __init__(self, request: ResponsesRequest, request_id: str, created: int) -> None:
        self._request = request
        self._id = request_id.replace("-", "")
        self._request_id = request_id
        self.is_stored = False  # whether what is answered is to be stored
        self._ahead = b""  # what was written of a stream before its end,
        self._final: dict[str, Any] | None = None  # once that is settled
        self._created = created
        self._tools = {offered.called: offered for offered in offered_tools(request)}
        self._items: OutputItems | NativeItems = OutputItems(self._id, self._tools)
        self._usage: dict[str, Any] | None = None
        self._model_used: str | None = None  # known once there is a reply
        self._number = 0  # of the next event
        self._has_begun = False  # whether the stream has told of the response

    @property
    def response_id(self) -> str:
        """The id of the response."""
        return "resp_" + self._id

    def queue(self) -> tuple[dict[str, Any], bytes]:
        """Return a response that runs in the background as it is before it runs, and the events that say so."""
        queued = self._response("queued")
        self._has_begun = True
        kinds = ("response.created", "response.queued")
        return queued, b"".join(self._event({"type": kind, "response": queued}) for kind in kinds)

    def warm_up(self) -> bytes:
        """Return the events of a response that is not to be generated."""
        self._usage = usage_object(Usage(), 0)
        begun = self._event({"type": "response.created", "response": self._response("in_progress")})
        ended = self._response("completed") | {"completed_at": self._created}
        return begun + self._event({"type": "response.completed", "response": ended})

    def unfinished(self, status: str, error: ServiceError | None = None) -> dict[str, Any]:
        """Return the response as it is in a ``status`` without an end: in_progress, failed or cancelled."""
        told = None if error is None else {"code": error.code or error.type, "message": error.message}
        return self._response(status) | {"error": told, "output": self._items.all()}

    def settle(self, reply: ReplyFacts, ending: Ending) -> dict[str, Any]:
        """Return the response as it will be at its end, which is then written so."""
        if isinstance(ending, list):
            self._ahead = self.pieces(reply, ending[:-1])
            self._final = self._ended(reply)
        else:
            assert isinstance(ending, tuple)
            self._final = self._whole(reply, *ending)
        return self._final

    def whole(self, reply: ReplyFacts, whole: WholeReply, usage: Usage) -> bytes:
        """Return a ``response`` object."""
        return msgspec.json.encode(self._final or self._whole(reply, whole, usage))

    def _whole(self, reply: ReplyFacts, whole: WholeReply, usage: Usage) -> dict[str, Any]:
        assert isinstance(whole, ChatReply)
        self._model_used = reply.target.model.name
        self._usage = usage_object(usage, reply.record.cost_nanousd)
        if whole.told is not None:
            self._items = NativeItems(self._id)
            self._items.take_whole(whole.told)
            self._items.finish_reason = whole.choices[0].finish_reason
            return self._ended(reply)
        for event in events_of(whole, usage):
            if isinstance(event, Delta):
                self._items.add(event)
        return self._ended(reply)

    def pieces(self, reply: ReplyFacts, events: list[Event]) -> bytes:
        """Return the events for what came together, and the whole response at the end."""
        if self._final is not None:
            return self._ahead + self._end()
        out: list[bytes] = []
        if self._model_used is None:
            self._model_used = reply.target.model.name
            if (begun := next((event.told for event in events if isinstance(event, Delta)), None)) is not None:
                self._items = NativeItems(self._id)
                self._items.begin(begun)
            for kind in ("response.created", "response.in_progress")[self._has_begun :]:
                out.append(self._event({"type": kind, "response": self._response("in_progress")}))
        for event in events:
            match event:
                case Delta():
                    out += map(self._event, self._items.add(event))
                case UsageReport(usage):
                    self._usage = usage_object(usage, reply.record.cost_nanousd)
                case ReplyEnd():
                    self._final = self._ended(reply)
                    out.append(self._end())
        return b"".join(out)

    def _end(self) -> bytes:
        assert self._final is not None
        return self._event({"type": f"response.{self._final['status']}", "response": self._final})

    def error(self, error: ServiceError) -> bytes:
        """Return the events by which clients learn that a response failed."""
        failed = self.unfinished("failed", error)
        told = failed["error"]
        param = {"param": error.param, "request_id": self._request_id, **error.facts}
        return self._event({"type": "response.failed", "response": failed}) + self._event(
            {"type": "error", **told, **param}
        )

    def _event(self, data: dict[str, Any]) -> bytes:
        data["sequence_number"] = self._number
        self._number += 1
        return encode_event(msgspec.json.encode(data), data["type"].encode())

    def _ended(self, reply: ReplyFacts) -> dict[str, Any]:
        """Return the response as it is at its end."""
        reason = INCOMPLETE.get(self._items.finish_reason)
        return self._response("completed" if reason is None else "incomplete") | {
            "completed_at": None if reason else int(self._created + reply.record.total_ms / 1000),
            "incomplete_details": None if reason is None else {"reason": reason},
            "output": self._items.all(),
        }

    def _response(self, status: str) -> dict[str, Any]:
        """Return the response without what was answered, and with what was asked: other fields as an upstream of this
        API tells them, or by their defaults."""
        asked = self._request
        told = self._items.response if isinstance(self._items, NativeItems) else {}
        return {
            **_defaults(asked),
            **told,
            "id": "resp_" + self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": asked.model,
            "model_used": self._model_used,
            "output": [],
            "usage": self._usage,
            "instructions": asked.instructions,
            "tools": [_tool(tool) for tool in asked.tools or ()],
            "max_tool_calls": asked.max_tool_calls,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "user": asked.user,
            "safety_identifier": asked.safety_identifier,
            "prompt_cache_key": asked.prompt_cache_key,
            "store": self.is_stored,
            "background": bool(asked.background),
            "previous_response_id": asked.previous_response_id,
            "conversation": {"id": asked.conversation_id} if asked.conversation_id else None,
        }


def _defaults(asked: ResponsesRequest) -> dict[str, Any]:
    """Return what a response says of what was asked where its upstream does not."""
    text, reasoning = asked.text or TextConfig(), asked.reasoning or ReasoningConfig()
    return {
        "tool_choice": asked.tool_choice or "auto",
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "top_logprobs": asked.top_logprobs or 0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "text": {"format": text.format or {"type": "text"}, "verbosity": text.verbosity or "medium"},
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "truncation": "disabled",  # what is too long for a model is refused
        "service_tier": "default",
    }


class CompactionWriter(WholeWriter):
    """Writes a conversation made shorter: what users said, and then what a model said of it all, sealed."""

    seal: Callable[[str], str]  # set before anything is written

    def __init__(self, request: Compaction, request_id: str, created: int) -> None:
        self.request = request  # as it is once stored turns are read
        self._suffix = request_id.replace("-", "")
        self._created = created

    def whole(self, reply: ReplyFacts, whole: WholeReply, usage: Usage) -> bytes:
        """Return a ``response.compaction`` object."""
        assert isinstance(whole, ChatReply)
        reason = INCOMPLETE.get(whole.choices[0].finish_reason)
        said = [item for item in self.request.input[:-1] if not isinstance(item, str) and item.role == "user"]
        output = [told_item(replace(item, id=None), f"msg_{self._suffix}{place:04}") for place, item in enumerate(said)]
        sealed = self.seal(whole.choices[0].message.content or "")
        output.append({"id": f"cmp_{self._suffix}0000", "type": "compaction", "encrypted_content": sealed})
        return msgspec.json.encode(
            {
                "id": "resp_" + self._suffix,
                "object": "response.compaction",
                "created_at": self._created,
                "incomplete_details": None if reason is None else {"reason": reason},
                "model_used": reply.target.model.name,
                "output": output,
                "usage": usage_object(usage, reply.record.cost_nanousd),
            }
        )


def usage_object(usage: Usage, cost_nanousd: int) -> dict[str, Any]:
    """Return this API's usage object, with the cost as a decimal text."""
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_input_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
        },
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
        "cost_usd": to_text(cost_nanousd),
    }


def _tool(tool: ResponsesTool) -> dict[str, Any]:
    """Return a tool with all the fields that clients look for, and without the secrets by which an upstream uses it."""
    empty = {"description": None, "parameters": None, "strict": None} if tool.type == "function" else {}
    said: dict[str, Any] = msgspec.to_builtins(replace(tool, authorization=None, headers=None))
    return empty | said
