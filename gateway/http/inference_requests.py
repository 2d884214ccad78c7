# What the inference routes share: a request's body and headers become a Call.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from msgspec import Struct

from gateway.calls.call import Call
from gateway.core.errors import Forbidden
from gateway.dialects.checks import check_tags, refuse_unpriced
from gateway.dialects.options import read_idempotency_key, read_options, routing_options
from gateway.http.exchange import AnyRequest, caller_of, read_body, services_of
from protocol.decoding import decode_with_extra
from protocol.messages import MessagesRequest
from router.catalog.targets import Tier

T = TypeVar("T", bound=Struct)


async def read_call(request: AnyRequest, kind: type[T], check: Callable[[T], None], endpoint: str) -> Call:
    """Decode a request's body as ``kind``, ``check`` it, and return the call that it makes. Raises BadRequest and its
    kin."""

    def read(body: bytes) -> tuple[T, dict[str, Any]]:
        asked, extra = decode_with_extra(body, kind)
        note_model(request, asked)
        check(asked)
        return asked, extra

    (asked, extra), size = await read_body(request, read)
    return call_of(request, asked, extra, endpoint, size)


def note_model(request: AnyRequest, asked: Any) -> None:
    """Note the model that a decoded body asks for: for the log, should the call be refused from here on."""
    request.scope["state"]["model_asked"] = asked.model


def call_of(
    request: AnyRequest,
    asked: Any,
    extra: dict[str, Any],
    endpoint: str,
    size: int,
    native: MessagesRequest | None = None,
) -> Call:
    """Return the call that a decoded request of ``size`` bytes makes; ``extra`` are its fields unknown to us.

    Raises BadRequest.
    """
    services = services_of(request)
    caller = caller_of(request)
    options = read_options(request.headers, extra)
    if options.team_id is not None and options.team_id != caller.team.id:
        raise Forbidden("The request names another team than the key's own.", param="team_id")
    refuse_unpriced(extra)
    check_tags(asked)
    return Call(
        request_id=request.scope["state"]["request_id"],
        caller=caller,
        endpoint=endpoint,
        request=asked,
        native=native,
        routing=routing_options(services, caller, options, Tier(options.tier)),
        priority=options.priority,
        extra=extra,
        size=size,
        client_request_id=request.scope["state"].get("client_request_id"),
        traceparent=None if services.tracer is None else request.headers.get("traceparent"),
        idempotency_key=read_idempotency_key(request.headers),
        created_at=services.clock.now(),
        started=services.clock.monotonic(),
    )
