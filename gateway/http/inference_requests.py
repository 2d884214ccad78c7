# What the inference routes share: a request's body and headers become a Call.

from __future__ import annotations

from typing import Any

import msgspec

from gateway.calls.call import Call
from gateway.core.clock import Clock
from gateway.dialects.endpoint import ApiEndpoint, Asked
from gateway.dialects.options import options_of, placing_of, read_idempotency_key, routing_options
from gateway.http.exchange import AnyRequest, caller_of, part_of, read_body
from gateway.inference.recalibrations import Recalibrations
from gateway.stored_responses.local_turns import CONNECTION_TURNS, ConnectionTurns
from gateway.stored_responses.memory import ResponseMemory
from protocol.decoding import decode


async def read_call(request: AnyRequest, endpoint: ApiEndpoint) -> Call:
    """Decode and check a request's body, and return the call that it makes. Raises BadRequest and its kin."""

    def read(body: bytes) -> Asked:
        return endpoint.read(with_deployment(request, body), lambda model: note_model(request, model))

    asked, size = await read_body(request, read)
    asked, size = await recalled(request, endpoint, asked, size)
    return call_of(request, endpoint, asked, size)


async def recalled(request: AnyRequest, endpoint: ApiEndpoint, asked: Asked, size: int) -> tuple[Asked, int]:
    """Return what a body of ``size`` bytes asks, with the stored items that it goes on from. Raises BadRequest."""
    if not endpoint.has_memory:
        return asked, size
    local = turns_of(request)
    return await part_of(request, ResponseMemory).recall(caller_of(request).team.id, asked, size, local)


def turns_of(request: AnyRequest) -> ConnectionTurns | None:
    """Return what is kept for the WebSocket that a request came over, if it did."""
    extensions: Any = request.scope.get("extensions")
    turns: ConnectionTurns | None = extensions.get(CONNECTION_TURNS) if extensions else None
    return turns


def deployment_of(request: AnyRequest) -> str | None:
    """Return the model that a request's path names, as Azure's clients do: whatever its body says, that is asked."""
    deployment: str | None = request.scope["state"].get("deployment")
    return deployment


def with_deployment(request: AnyRequest, body: bytes) -> bytes:
    """Return a body in JSON with the model that its request's path names, where one does. Raises BadRequest."""
    if (deployment := deployment_of(request)) is None:
        return body
    return msgspec.json.encode({**decode(body, dict[str, msgspec.Raw]), "model": deployment})


def note_model(request: AnyRequest, model: str) -> None:
    """Note the model that a decoded body asks for: for the log, should the call be refused from here on."""
    request.scope["state"]["model_asked"] = model


def call_of(
    request: AnyRequest, endpoint: ApiEndpoint, asked: Asked, size: int, uploads: tuple[memoryview, ...] = ()
) -> Call:
    """Return the call to ``endpoint`` that a body of ``size`` bytes makes, with the files of its form. Raises
    BadRequest and its kin."""
    caller, clock = caller_of(request), part_of(request, Clock)
    options, extensions = options_of(asked, caller, endpoint.name, request.headers, "key")
    return Call(
        request_id=request.scope["state"]["request_id"],
        caller=caller,
        endpoint=endpoint.name,
        limit_headers=endpoint.limit_headers,
        request=asked.request,
        native=endpoint.with_headers(asked.native, request.headers),
        shown=asked.shown,
        routing=routing_options(part_of(request, Recalibrations), caller, options, options.tier, extensions),
        priority=options.priority,
        placing=placing_of(options),
        extra=asked.extra,
        understood=extensions.understood,
        unread=asked.unread,
        size=size,
        uploads=uploads,
        client_request_id=request.scope["state"].get("client_request_id"),
        traceparent=request.headers.get("traceparent"),
        cache=options.cache or caller.cache,
        idempotency_key=read_idempotency_key(request.headers),
        created_at=clock.now(),
        started=clock.monotonic(),
    )
