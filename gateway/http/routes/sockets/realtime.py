# Conversations by voice: opened over a WebSocket, and by client secrets, which pages of browsers may show.

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from litestar import Response, get, post
from msgspec import Meta, Struct

from gateway.accounts.client_secrets import ClientSecrets
from gateway.accounts.guards import read_key, team_guard
from gateway.calls.call import Call
from gateway.core.clock import Clock
from gateway.core.errors import Forbidden, UpgradeRequired
from gateway.core.keys import KEY_PREFIX
from gateway.dialects.checks import require
from gateway.dialects.options import check_endpoint, read_options, routing_options
from gateway.dialects.table import REALTIME, REALTIME_PATH
from gateway.http.current_edition import edition_of
from gateway.http.exchange import AnyRequest, answer, caller_of, part_of, read_body, read_parameters
from gateway.http.inference_requests import note_model
from gateway.http.websocket.protocol import SOCKET
from gateway.http.websocket.realtime import RealtimeSession
from gateway.inference.recalibrations import Recalibrations
from gateway.overload.read_limit import StoredLimit
from gateway.realtime.client_events import Session, checked_session
from gateway.realtime.gateway import Realtime
from gateway.telemetry.refusals import Refusals
from protocol.decoding import decode
from protocol.errors import BadRequest, ServiceError, invalid_value, missing_param
from protocol.media.audio import RealtimeRequest
from router.catalog.targets import Tier

LONGEST_SECRET = 6_000  # characters: it stands in a line of a handshake
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
    secret = caller_of(request).secret
    model = query.get("model") or (secret and secret.model)
    if not model:
        raise missing_param("model", "Missing query parameter: 'model'. Open /v1/realtime?model=NAME.")
    note_model(request, model)
    if secret is not None:
        require(model == secret.model, "model", f"This client secret is for the model '{secret.model}'.")
        session.first = b'{"type":"session.update","session":%b}' % bytes(secret.session)
    call = _call_of(request, model, request.scope["state"]["request_id"])
    session.begin(call.caller)

    async def renew() -> Call:
        """Return the next call of the conversation, its key looked at anew. Raises what refuses it."""
        request.scope["state"]["request_id"] = request_id = part_of(request, Clock).new_id()
        request.scope["state"]["has_begun"] = True
        await team_guard(request, request.route_handler)
        return _call_of(request, model, request_id)

    def refused(error: ServiceError) -> None:
        scope: Any = request.scope
        part_of(request, Refusals).note(scope, error)

    session.relay = await part_of(request, Realtime).open(lambda: edition_of(request), call, renew, refused)
    return answer({})


class ExpiresAfter(Struct, frozen=True, forbid_unknown_fields=True):
    """How long conversations may be begun."""

    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Meta(ge=10, le=7200)] = 600


class NewClientSecret(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A client secret to be made."""

    session: Session
    expires_after: ExpiresAfter = ExpiresAfter()


@post(
    f"{REALTIME_PATH}/client_secrets",
    guards=[team_guard],
    status_code=200,
    summary="Make a client secret for conversations by voice",
    takes=NewClientSecret,
)
async def create_client_secret(request: AnyRequest) -> Response[bytes]:
    """Return a secret that a page of a browser may show: for ``session.model`` alone, with the key's limits, and for
    ``expires_after.seconds`` (10 to 7,200; 600), while conversations may be begun by it."""
    part_of(request, StoredLimit).take(caller_of(request).team.id)
    new, _ = await read_body(request, partial(decode, type=NewClientSecret))
    model = new.session.model
    if not model:
        raise missing_param("session.model", "Missing required parameter: 'session.model'.")
    note_model(request, model)
    call, inference = _call_of(request, model, request.scope["state"]["request_id"]), edition_of(request).inference
    route = await inference.chooser.choose(call, inference.chooser.health(call.caller.team))
    session = checked_session(new.session, model, model, route.targets[0].model.max_output)
    key = read_key(request) or ""
    if not key.startswith(KEY_PREFIX):
        raise Forbidden("A client secret is made with a team's key: a token of an identity provider ends too soon.")
    told, ends = msgspec.json.encode(session), call.created_at + new.expires_after.seconds
    expires_at = int(min(ends, call.caller.expires_at or ends))
    value = part_of(request, ClientSecrets).made(key, model, told, call.request.user, expires_at)
    words = "A client secret has room for some 4,000 bytes of a session: send the rest with 'session.update'."
    require(len(value) <= LONGEST_SECRET, "session", words)
    shown = {**msgspec.json.decode(told), "id": f"sess_{call.request_id}", "object": "realtime.session"}
    return answer({"value": value, "expires_at": expires_at, "session": shown})


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
    user = headers.get(USER) if caller.secret is None else caller.secret.user
    if user is not None and USER_TEXT.fullmatch(user) is None:
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
