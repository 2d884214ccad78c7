# Text completions in OpenAI's shapes: what is checked of a request, and how its reply is written.

from __future__ import annotations

from typing import Any

import msgspec

from gateway.dialects.chat import ChunkWriter, check_sampling, usage_object
from gateway.dialects.checks import require, require_between
from gateway.dialects.endpoint import ApiEndpoint, ReplyFacts
from protocol.completions import MOST_PROMPTS, CompletionReply, CompletionRequest, number_of
from protocol.events import Delta, Event, ReplyEnd, UsageReport
from protocol.inference import WholeReply
from protocol.sse import DONE, encode_event
from protocol.usage import Usage


def check_completion(request: CompletionRequest) -> None:
    """Refuse what the types let through and OpenAI's API does not. Raises BadRequest."""
    require(request.prompt not in ([], [[]]), "prompt", "'prompt' must hold at least one prompt.")
    require(number_of(request.prompt) <= MOST_PROMPTS, "prompt", f"'prompt' may hold at most {MOST_PROMPTS} prompts.")
    require_between(request.max_tokens, 0, 2**31, "max_tokens")  # 0 and an echo: the prompt's scores alone
    check_sampling(request)
    require_between(request.logprobs, 0, 5, "logprobs")
    require_between(request.best_of, 1, 128, "best_of")
    require((request.best_of or 128) >= (request.n or 1), "best_of", "'best_of' must not be less than 'n'.")
    require(not (request.stream and (request.best_of or 1) > 1), "best_of", "'best_of' cannot be streamed.")


class CompletionWriter(ChunkWriter):
    """Writes completions and their chunks, which share one object name."""

    def __init__(self, request: CompletionRequest, request_id: str, created: int) -> None:
        super().__init__(request, request_id, created)
        self._head: dict[str, Any] = {
            "id": "cmpl-" + request_id.replace("-", ""),
            "object": "text_completion",
            "created": created,
            "model": request.model,
        }

    def whole(self, reply: ReplyFacts, whole: WholeReply, usage: Usage) -> bytes:
        """Return a ``text_completion`` object."""
        assert isinstance(whole, CompletionReply)
        choices = [
            {"index": item.index, "text": item.text, "logprobs": item.logprobs, "finish_reason": item.finish_reason}
            for item in whole.choices
        ]
        return msgspec.json.encode(
            self._object(reply, choices) | {"usage": usage_object(usage, reply.record.cost_nanousd)}
        )

    def _piece(self, reply: ReplyFacts, event: Event) -> bytes:
        match event:
            case Delta() if not (event.text or event.finish_reason or event.logprobs):
                return b""  # the ids of tokens that complete no character
            case Delta():
                chunk = self._object(
                    reply,
                    [
                        {
                            "index": event.index,
                            "text": event.text,
                            "logprobs": event.logprobs,
                            "finish_reason": event.finish_reason,
                        }
                    ],
                )
                if self._includes_usage:
                    chunk["usage"] = self._so_far(reply) if self._keeps_telling else None
                return encode_event(msgspec.json.encode(chunk))
            case UsageReport(usage):
                if not self._includes_usage:
                    return b""
                report = {"usage": usage_object(usage, reply.record.cost_nanousd)}
                return encode_event(msgspec.json.encode(self._object(reply, []) | report))
            case ReplyEnd():
                return DONE

    def _object(self, reply: ReplyFacts, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "model_used": reply.target.model.name, "choices": choices}


ENDPOINT = ApiEndpoint(
    path="/v1/completions",
    name="completions",
    operation="create_completion",
    summary="Complete a text",
    description="Go on from a prompt, whole or as a stream of chunks.",
    body_type=CompletionRequest,
    check=check_completion,
    writer=CompletionWriter,
    is_for_batches=True,
    route_field="prompt",
)
