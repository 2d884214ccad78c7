# The wire format of OpenAI's Responses API. Its failures are those of OpenAI's other APIs.

from __future__ import annotations

from gateway.upstreams.openai.wire_format import OpenAIFormat
from gateway.upstreams.responses.replies import ResponsesEvents, read_response
from gateway.upstreams.responses.request import write_count, write_request
from gateway.upstreams.wire.base import Asking, EventStream, UpstreamRequest
from protocol.inference import Request, WholeReply
from protocol.usage import Usage


class ResponsesFormat(OpenAIFormat):
    """Asks an upstream for a response, where a caller asked for one."""

    def build_request(self, asking: Asking) -> UpstreamRequest:
        """Return the request: decoded fields and items encoded again, the model under its upstream name."""
        return write_request(asking)

    def build_count(self, asking: Asking) -> UpstreamRequest:
        """Return the request for POST /responses/input_tokens."""
        return write_count(asking)

    def read_reply(self, request: Request, body: bytes) -> tuple[WholeReply, Usage | None]:
        """Return the response that ``body`` holds as the chat that it is, beside itself."""
        return read_response(body)

    def open_events(self, request: Request) -> EventStream:
        """Return a reader for a streamed response."""
        return ResponsesEvents()
