# GET /v1/realtime: opens a conversation by voice, over a WebSocket.

from __future__ import annotations

import re
from typing import Any

from litestar import Response, get

from gateway.accounts.guards import team_guard
from gateway.calls.call import Call
from gateway.core.clock import Clock
from gateway.core.errors import Forbidden, UpgradeRequired
from gateway.dialects.options import check_endpoint, read_options, routing_options
from gateway.dialects.table import REALTIME, REALTIME_PATH
from gateway.http.current_edition import edition_of
from gateway.http.exchange import AnyRequest, answer, caller_of, part_of, read_parameters
from gateway.http.inference_requests import note_model
from gateway.http.websocket.protocol import SOCKET
from gateway.http.websocket.realtime import RealtimeSession
from gateway.inference.recalibrations import Recalibrations
from gateway.realtime.gateway import Realtime
from gateway.telemetry.refusals import Refusals
from protocol.errors import BadRequest, ServiceError, invalid_value, missing_param
from protocol.media.audio import RealtimeRequest
from router.catalog.targets import Tier

USER = "openai-safety-identifier"  # a header, as OpenAI has it
USER_TEXT = re.compile(r"[\x21-\x7e]{1,512}")


@get(REALTIME_PATH, guards=[team_guard], summary="Open a conversation by voice", query=("model",))
async def open_realtime(request: AnyRequest) -> Response[bytes]:
    """Open a WebSocket (``upgrade: websocket``) to a model that hears and speaks, in the events of OpenAI's Realtime
    API. Each response is a call of its own."""
    query = read_parameters(request)
    extensions: Any = request.scope.get("extensions")
    session: RealtimeSession | None = extensions.get(SOCKET) if extensions else None
    if session is None:
        raise UpgradeRequired("GET opens a WebSocket: send 'upgrade: websocket'.")
    if "model" not in query:
        raise missing_param("model", "Missing query parameter: 'model'. Open /v1/realtime?model=NAME.")
    note_model(request, query["model"])
    call = _call_of(request, query["model"], request.scope["state"]["request_id"])
    session.begin(call.caller)

    async def renew() -> Call:
        """Return the next call of the conversation, its key looked at anew. Raises what refuses it."""
        request.scope["state"]["request_id"] = request_id = part_of(request, Clock).new_id()
        await team_guard(request, request.route_handler)
        return _call_of(request, query["model"], request_id)

    def refused(error: ServiceError) -> None:
        scope: Any = request.scope
        part_of(request, Refusals).note(scope, error)

    session.relay = await part_of(request, Realtime).open(lambda: edition_of(request), call, renew, refused)
    return answer({})


def _call_of(request: AnyRequest, model: str, request_id: str) -> Call:
    """Return a call of the conversation that a request opens. Raises BadRequest and its kin."""
    caller, clock, headers = caller_of(request), part_of(request, Clock), request.headers
    check_endpoint(caller, REALTIME)
    options = read_options(headers, {})
    if options.team_id is not None and options.team_id != caller.team.id:
        raise Forbidden("The request names another team than the key's own.", param="team_id")
    if options.tier != "interactive":
        raise invalid_value("x-tier", "is 'interactive' for a conversation")
    if "idempotency-key" in headers:
        words = "An Idempotency-Key is for one answer: a conversation has none."
        raise BadRequest(words, param="Idempotency-Key")
    if (user := headers.get(USER)) is not None and USER_TEXT.fullmatch(user) is None:
        raise BadRequest(f"The header {USER} is 1 to 512 printable characters of ASCII.", param=USER)
    return Call(
        request_id=request_id,
        caller=caller,
        endpoint=REALTIME,
        request=RealtimeRequest(model=model, user=user),
        routing=routing_options(part_of(request, Recalibrations), caller, options, Tier.INTERACTIVE),
        priority=options.priority,
        client_request_id=request.scope["state"].get("client_request_id"),
        traceparent=headers.get("traceparent"),
        created_at=clock.now(),
        started=clock.monotonic(),
    )
