# The wire format of Amazon Bedrock: Converse and ConverseStream. Requests are written in request.py, replies read in
# replies.py and events.py; here is how they are sent, and what failures of its own kind mean.

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from gateway.upstreams.anthropic.replies import read_message, told_in
from gateway.upstreams.anthropic.request import AS_CHAT, body_of
from gateway.upstreams.bedrock.events import BedrockEvents
from gateway.upstreams.bedrock.replies import as_message
from gateway.upstreams.bedrock.request import converse_body, keeps_prompts
from gateway.upstreams.bedrock.signing import region_of, signed
from gateway.upstreams.wire.base import Asking, EventStream, UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamBusy, UpstreamError, UpstreamFailure, UpstreamTimeout
from gateway.upstreams.wire.reading import OBJECTS, decoded, read_error_fields, read_retry_after, text_of, usual_failure
from gateway.upstreams.wire.unsayable import Unsayable, is_marked
from protocol.chat import ChatRequest
from protocol.decoding import NOT_JSON
from protocol.inference import Request, WholeReply
from protocol.usage import Usage

TOO_LONG = re.compile(r"Input is too long|too many (?:input )?tokens|maximum (?:context|number of tokens)", re.I)
OF_THE_KEY = ("UnrecognizedClient", "ExpiredToken", "AccessDenied", "InvalidSignature", "MissingAuthentication")
OF_A_CHAT = AS_CHAT | {"metadata": "user", "output_config": "reasoning_effort"}  # what is left out, in its words
CARRIED = ("cache_control", "context_management", "output_config.task_budget")  # of what Anthropic's API alone knows
FULL = ("ModelNotReady", "ServiceUnavailable")


class BedrockFormat:
    """Speaks Converse to an upstream. Its base URL is that of the runtime, without a path."""

    def build_request(self, asking: Asking) -> UpstreamRequest:
        """Return the request for POST /model/ID/converse, or …/converse-stream. Raises Unsayable for what it lacks."""
        request, model = asking.request, asking.target.model
        if not isinstance(request, ChatRequest):
            raise Unsayable("The model that answers here takes chat completions alone.", param="model")
        if asking.native is not None:
            if asking.native.is_kept_an_hour:
                words = "No cache is kept for an hour at the model that answers here. Say a 'ttl' of 5m."
                raise Unsayable(words, param="cache_control")
            if asking.native.run_upstream:
                words = "No search of the web, no page and no code is run at the model that answers here."
                raise Unsayable(
                    f"{words} Run it yourself, as one of the 'tools' with an 'input_schema'.", param="tools"
                )
        told, dropped = body_of(asking, request, streams=False)
        if asking.native is not None:
            if asking.native.betas:
                told["anthropic_beta"] = sorted(asking.native.betas)
            dropped += [name for name in asking.native.anthropics_wishes() if name not in CARRIED]
        is_said = asking.native.has_cache_marks if asking.native else any(map(is_marked, request.messages))
        if is_said and not keeps_prompts(model.upstream_model):
            dropped.append("cache_control")
        body, left_out = converse_body(told, model.upstream_model)
        names = OF_A_CHAT if asking.native is None else {"metadata": "metadata.user_id"}
        dropped += dict.fromkeys(names.get(name, name) for name in left_out)
        dropped += [name for name in asking.left_out if name not in told]
        data = msgspec.json.encode(body)
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        base_url = asking.target.endpoint.base_url
        method = "converse-stream" if asking.streams else "converse"
        url = f"{base_url}/model/{quote(model.upstream_model, safe='')}/{method}"
        if asking.token is not None:
            region = region_of(base_url, asking.target.endpoint.region)
            headers = signed(url, headers, data, asking.token, region)
        elif asking.api_key:
            headers["authorization"] = f"Bearer {asking.api_key}"
        return UpstreamRequest("POST", url, headers, data, dropped=tuple(dropped))

    def read_reply(self, request: Request, body: bytes) -> tuple[WholeReply, Usage | None]:
        """Return the answer that ``body`` holds."""
        told = decoded(body, OBJECTS)
        message = as_message(told)
        if message is None:
            raise UpstreamError("The upstream's answer is empty, or not what was asked for.", outcome="malformed")
        return read_message(msgspec.json.encode(message), told_in(request))

    def open_events(self, request: Request) -> EventStream:
        """Return a reader for a streamed answer."""
        return BedrockEvents(told_in(request))

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> UpstreamFailure:
        """Return what a failing answer means: whose fault it is, and whether another target may be tried."""
        kind = headers.get("x-amzn-errortype", "")
        message = _message_in(body)
        if kind.startswith(OF_THE_KEY):
            return UpstreamError("The upstream refused the gateway's own credentials.", outcome="refused_key")
        if kind.startswith("ModelTimeout") or status == 408:
            return UpstreamTimeout("The model did not answer in time.")
        if kind.startswith(FULL) or status == 503:
            wait = read_retry_after(headers)
            return UpstreamError("The upstream is overloaded.", outcome="overloaded", retry_after=wait)
        if kind.startswith("ServiceQuotaExceeded"):
            return UpstreamBusy("The upstream's quota is reached.", retry_after=read_retry_after(headers))
        if status == 424:  # ModelErrorException: the model broke while it answered
            return UpstreamError("The model failed while it answered.", outcome="status_424")
        code = "context_length_exceeded" if status == 400 and TOO_LONG.search(message) else None
        return usual_failure(status, headers, message, code=code)


def _message_in(body: bytes) -> str:
    """Return what a failing answer says: beside no error object."""
    try:
        told = msgspec.json.decode(body[: 64 * 1024], type=dict[str, Any])
    except NOT_JSON:
        return ""
    said = text_of(told.get("message")) or text_of(told.get("Message"))
    return said or read_error_fields(body).get("message", "")
