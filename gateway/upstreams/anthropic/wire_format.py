# The Anthropic wire format: the Messages API. Requests are written in request.py, replies read in
# replies.py and events.py; here is how they are sent, and what failures of its own kind mean.

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from billing.core.prices import says_an_hour
from gateway.upstreams.anthropic.events import AnthropicEvents
from gateway.upstreams.anthropic.replies import read_message, told_in
from gateway.upstreams.anthropic.request import body_of, count_body, mark_last_block
from gateway.upstreams.wire.base import Asking, EventStream, UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamBusy, UpstreamError, UpstreamFailure
from gateway.upstreams.wire.filters import STATUSES, read_filtered
from gateway.upstreams.wire.reading import read_error_fields, read_retry_after, usual_failure
from gateway.upstreams.wire.unsayable import Unsayable
from protocol.chat import ChatRequest
from protocol.inference import Request, WholeReply
from protocol.messages import CODE_EXECUTION, WEB_FETCH, WEB_SEARCH, MessagesRequest
from protocol.usage import Usage
from router.catalog.targets import Target

VERSION = "2023-06-01"
VERTEX_VERSION, AT_VERTEX = "vertex-2023-10-16", "/publishers/anthropic"
TOO_LONG = re.compile(r"prompt is too long|input length and `max_tokens` exceed")  # how it words this one fault
# And an account that is used up, which it tells under a 400: a message that begins so has no caller's words in it.
SPENT = re.compile(r"Your credit balance is too low|You have reached your specified (?:\w+ )?API usage limits")


class AnthropicFormat:
    """Speaks Anthropic's dialect to an upstream. Its base URL is written as Anthropic's SDK takes it, without /v1."""

    def build_request(self, asking: Asking) -> UpstreamRequest:
        """Return the request for POST /v1/messages. Raises Unsayable for what this dialect does not know."""
        request, model = asking.request, asking.target.model
        if not isinstance(request, ChatRequest):
            raise Unsayable("The model that answers here takes chat completions alone.", param="model")
        if asking.native is not None:
            if asking.native.is_kept_an_hour and not says_an_hour(model.price):
                words = "What a cache of an hour costs at the model that answers here is not known. Say a 'ttl' of 5m."
                raise Unsayable(words, param="cache_control")
            _check_tools(asking)
        body, dropped = body_of(asking, request, streams=asking.streams)
        dropped += [name for name in asking.left_out if name not in body]
        headers = _credentials(asking.api_key, asking.token) | _betas(asking.native)
        if is_at_vertex(asking.target):
            del body["model"]  # which is in the path there, as the version is in the body
            if (mark := body.pop("cache_control", None)) is not None:  # known to Anthropic's own API alone
                mark_last_block(body, mark)
            method = "streamRawPredict" if asking.streams else "rawPredict"
            path = f"/models/{quote(model.upstream_model, safe='@')}:{method}"
            return _post(path, {"anthropic_version": VERTEX_VERSION} | body, asking.target, headers, dropped)
        return _post("/v1/messages", body, asking.target, headers | {"anthropic-version": VERSION}, dropped)

    def build_count(self, asking: Asking) -> UpstreamRequest:
        """Return the request for POST /v1/messages/count_tokens."""
        headers = _credentials(asking.api_key, None) | _betas(asking.native) | {"anthropic-version": VERSION}
        return _post("/v1/messages/count_tokens", count_body(asking), asking.target, headers)

    def read_reply(self, request: Request, body: bytes) -> tuple[WholeReply, Usage | None]:
        """Return the message that ``body`` holds."""
        return read_message(body, told_in(request))

    def open_events(self, request: Request) -> EventStream:
        """Return a reader for a streamed message."""
        return AnthropicEvents(told_in(request))

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> UpstreamFailure:
        """Return what a failing answer means: whose fault it is, and whether another target may be tried."""
        error = read_error_fields(body)
        if status in STATUSES and (filtered := read_filtered(error, status)) is not None:
            return filtered
        message, details = error.get("message", ""), error.get("details")
        is_spent = isinstance(details, dict) and details.get("error_code") == "enforced_spend_limit_reached"
        if status == 402 or (status == 429 and is_spent) or (status == 400 and SPENT.match(message)):
            return UpstreamBusy("The gateway's own account at the upstream is used up.", outcome="spend_cap")
        if status == 529:
            wait = read_retry_after(headers)
            return UpstreamError("The upstream is overloaded.", outcome="overloaded", retry_after=wait)
        code = "context_length_exceeded" if TOO_LONG.match(message) else None
        return usual_failure(status, headers, message, code=code)


def is_at_vertex(target: Target) -> bool:
    """Whether a target is one of Anthropic's models at Vertex AI, where the model is in the path."""
    return target.endpoint.base_url.endswith(AT_VERTEX)


def _check_tools(asking: Asking) -> None:
    """Raise Unsayable for tools that the upstream may not run, or whose price is not known."""
    asked, price = asking.native.run_upstream if asking.native is not None else (), asking.target.model.price
    words = ""
    if WEB_SEARCH in asked and price.web_search is None:
        words = "What a search of the web costs at the model that answers here is not known."
    elif CODE_EXECUTION in asked and not asking.hosted.code_interpreter:
        words = "The provider that answers here may not run code for your team. Its operator may allow it."
    elif CODE_EXECUTION in asked and price.code_interpreter is None:
        words = "What running code costs at the model that answers here is not known."
    elif is_at_vertex(asking.target) and not {WEB_FETCH, CODE_EXECUTION}.isdisjoint(asked):
        words = "No page is fetched and no code is run at Vertex AI, which answers here."
    if words:
        raise Unsayable(f"{words} Run it yourself, as one of the 'tools' with an 'input_schema'.", param="tools")


def _credentials(api_key: str | None, token: str | None) -> dict[str, str]:
    """Return the header that says who asks."""
    if token:
        return {"authorization": f"Bearer {token}"}
    return {"x-api-key": api_key} if api_key else {}


def _betas(asked: MessagesRequest | None) -> dict[str, str]:
    return {"anthropic-beta": ",".join(sorted(asked.betas))} if asked is not None and asked.betas else {}


def _post(
    path: str, body: dict[str, Any], target: Target, headers: Mapping[str, str], dropped: Iterable[str] = ()
) -> UpstreamRequest:
    frame = {"content-type": "application/json", "accept-encoding": "identity"}
    url = target.endpoint.base_url.rstrip("/") + path
    return UpstreamRequest("POST", url, frame | dict(headers), msgspec.json.encode(body), dropped=tuple(dropped))
