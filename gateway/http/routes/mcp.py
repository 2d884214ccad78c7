# POST /mcp/{server}: one message of the Model Context Protocol to one of the configured servers. GET /v1/mcp-servers:
# which servers and tools there are for a caller.

from __future__ import annotations

from typing import Any

import msgspec
import structlog
from litestar import Response, delete, get, post
from litestar.types import ASGIApp
from msgspec import UNSET

from gateway.accounts.guards import team_guard, team_or_admin_guard
from gateway.accounts.serializers import dollars, moment_of
from gateway.core.clock import Clock
from gateway.core.errors import Forbidden, RpcError
from gateway.core.principals import Admin
from gateway.core.settings import McpServer, Settings
from gateway.dialects.endpoint import rpc_error
from gateway.http.current_edition import edition_of
from gateway.http.exchange import AnyRequest, answer, caller_of, part_of, principal_of, read_body, read_parameters
from gateway.http.inference_port import inference_of
from gateway.http.stream_sender import StreamSender
from gateway.mcp.exchange import Answer, Sent
from gateway.mcp.gateway import McpCall, McpGateway
from gateway.mcp.grants import Grant, grant_of, grants_of
from gateway.mcp.messages import (
    CALL,
    HEADER_MISMATCH,
    INITIALIZE,
    INITIALIZED,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    METHODS,
    WITH_SESSIONS,
    McpMessage,
    body_for,
    check_version,
    headers_for,
    read_message,
    tool_of,
)
from gateway.mcp.results import encoded
from gateway.mcp.sessions import opened, sealed
from gateway.telemetry.refusals import Refusals
from protocol.errors import ServiceError
from protocol.serving.leaving import ended_when_client_leaves
from protocol.sse import encode_event

MESSAGE = b"message"
MOST_BYTES = 4 * 1024 * 1024  # of a message

log = structlog.get_logger()


@get("/v1/mcp-servers", guards=[team_or_admin_guard], summary="List the MCP servers")
async def list_mcp_servers(request: AnyRequest) -> Response[bytes]:
    """List the servers whose tools this caller may call: each tool that the configuration names, and its price.

    ``other_tools_usd``: what a call of any other tool costs; null where no other may be called. ``state``: of the
    server's breaker in the process that answers. Admins see the tools of all teams, and in ``teams`` which has which.
    """
    read_parameters(request)
    who, servers = principal_of(request), edition_of(request).settings.mcp_servers
    return answer({"object": "list", "data": [_server_view(request, one, who) for one in grants_of(servers, who)]})


def _server_view(request: AnyRequest, grant: Grant, who: object) -> dict[str, Any]:
    server = grant.server
    state, retry_in = part_of(request, McpGateway).standing(server)
    view: dict[str, Any] = {
        "object": "mcp_server",
        "id": server.name,
        "path": f"/mcp/{server.name}",
        "tools": [_tool_view(server, tool) for tool in sorted(server.named_tools) if grant.allows(tool)],
        "other_tools_usd": dollars(server.price) if grant.allows("*") else None,
        "state": state.value,
        "retry_at": moment_of(part_of(request, Clock).now() + retry_in) if retry_in else None,
    }
    if isinstance(who, Admin) and who.team_id is None:
        view["teams"] = {team: sorted(tools) for team, tools in server.teams.items()}
    return view


def _tool_view(server: McpServer, tool: str) -> dict[str, Any]:
    return {"name": tool, "model": server.label_of(tool), "price_usd": dollars(server.prices.get(tool, server.price))}


@post(
    "/mcp/{server:str}",
    guards=[team_guard],
    status_code=200,
    summary="Send a message to an MCP server",
    takes=McpMessage,
    request_max_body_size=MOST_BYTES,
)
async def send_to_mcp_server(request: AnyRequest) -> ASGIApp:
    """Pass a message on to one of the configured servers: its tools are listed and called, as far as the key may.

    Revisions 2026-07-28 and 2025-11-25 of the Model Context Protocol. A tool's call costs its price.
    """
    settings = edition_of(request).settings
    _check_origin(request.headers.get("origin"), settings)
    grant = grant_of(settings.mcp_servers, request.path_params["server"], caller_of(request))
    message, _ = await read_body(request, read_message)
    return McpResponse(request, settings, grant, message)


@delete("/mcp/{server:str}", guards=[team_guard], status_code=204, summary="End a session at an MCP server")
async def end_mcp_session(request: AnyRequest) -> None:
    """Have a server end the session that `mcp-session-id` names. The stateless revision has none."""
    settings, caller = edition_of(request).settings, caller_of(request)
    _check_origin(request.headers.get("origin"), settings)
    server = grant_of(settings.mcp_servers, request.path_params["server"], caller)
    version, session = request.headers.get("mcp-protocol-version"), request.headers.get("mcp-session-id")
    if version not in WITH_SESSIONS or session is None:
        raise RpcError(f"A session has its id and its version: {' or '.join(WITH_SESSIONS)}.", HEADER_MISMATCH)
    headers = {"mcp-protocol-version": version, "mcp-session-id": opened(session, settings, server.server, caller)}
    call = McpCall(
        request_id=request.scope["state"]["request_id"],
        caller=caller,
        grant=server,
        sent=Sent(server.server, McpMessage("2.0", ""), headers, b""),
    )
    await part_of(request, McpGateway).end_session(call)


def _check_origin(origin: str | None, settings: Settings) -> None:
    """Refuse a web page that is none of `cors.origins`, as the protocol asks. Raises Forbidden."""
    if origin is not None and origin not in settings.cors_origins and "*" not in settings.cors_origins:
        raise Forbidden("Pages of this origin may not call: `cors.origins` of the configuration does not name it.")


class McpResponse:
    """Answers one message: as JSON, or as a stream where the server tells something before a tool's answer.

    Errors have the status that says them in the stateless revision. Before it, a request that was understood is
    answered with 200: its clients take other statuses for the end of their session.
    """

    def __init__(self, request: AnyRequest, settings: Settings, grant: Grant, message: McpMessage) -> None:
        self._request, self._settings, self._grant, self._message = request, settings, grant, message
        self._is_stateless = True
        self._sender: StreamSender | None = None
        self._scope: Any = None  # of the request, once it is answered,
        self._send: Any = None  # and whither

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Run the call until its last byte is sent, or until its client leaves."""
        self._scope, self._send = scope, send
        try:
            call = self._call(scope["state"])
            if call is None:
                await self._send_whole(202, b"", {})
                return
            with ended_when_client_leaves(scope, receive) as client:
                async with part_of(self._request, McpGateway).answered(call, client, self._notify) as answer:
                    await self._finish(answer)
        except ServiceError as exc:
            await self._fail(exc)
        except Exception:
            if self._sender is None:
                raise
            log.exception("reply_failed", request_id=scope["state"]["request_id"])
            await self._fail(ServiceError("The answer broke off inside the gateway."))
        finally:
            if self._sender is not None:
                self._sender.close()

    def _call(self, state: Any) -> McpCall | None:
        """Return what a message asks of its server, ``None`` where that need not hear of it. Raises ServiceError."""
        message, request, caller = self._message, self._request, caller_of(self._request)
        headers = request.headers
        self._is_stateless = check_version(message, headers)
        if message.id is UNSET and (self._is_stateless or message.method != INITIALIZED):
            return None  # a client that has left ends its call; what else it may notify of is nothing to a server
        if message.id is not UNSET and message.method not in METHODS[self._is_stateless]:
            told = f"Method not found: tools are carried here, by {', '.join(METHODS[self._is_stateless])}."
            raise RpcError(told, METHOD_NOT_FOUND, status=404, code="method_not_found")
        is_first = message.method == INITIALIZE
        sent = headers_for(message, None if is_first else headers.get("mcp-protocol-version"), headers)
        session = None if self._is_stateless or is_first else headers.get("mcp-session-id")
        if session is not None:
            sent["mcp-session-id"] = opened(session, self._settings, self._grant.server, caller)
        if message.method == CALL:
            state["tool_asked"] = self._grant.server.label_of(tool_of(message))
        return McpCall(
            request_id=state["request_id"],
            caller=caller,
            grant=self._grant,
            sent=Sent(self._grant.server, message, sent, body_for(message)),
            client_request_id=state.get("client_request_id"),
        )

    async def _notify(self, data: bytes) -> None:
        """Pass on what a server tells before its answer; the first of it begins a stream."""
        if self._sender is None:
            self._sender = StreamSender(self._send, inference_of(self._request).keep_alive)
            self._scope["state"]["write_error"] = self._write_error
            await self._sender.begin([])
        await self._sender.send(encode_event(data, MESSAGE))

    async def _finish(self, answer: Answer) -> None:
        if self._message.id is UNSET:
            await self._send_whole(202, b"", answer.headers)
            return
        body = encoded(answer, self._message.id)
        if self._sender is not None:
            await self._sender.send(encode_event(body, MESSAGE), is_last=True)
            return
        headers = dict(answer.headers)
        if answer.session is not None:
            caller = caller_of(self._request)
            headers["mcp-session-id"] = sealed(answer.session, self._settings, self._grant.server, caller)
        await self._send_whole(self._status(answer.status), body, headers)

    async def _fail(self, error: ServiceError) -> None:
        """Answer with an error of JSON-RPC."""
        if self._sender is not None:
            await self._sender.send(self._write_error(error), is_last=True)
            return
        part_of(self._request, Refusals).note(self._scope, error)
        is_answer = isinstance(error, RpcError) and error.rpc_code in (METHOD_NOT_FOUND, INVALID_PARAMS)
        status = 200 if is_answer and not self._is_stateless else self._status(error.status)
        await self._send_whole(status, self._error(error), error.headers)

    def _write_error(self, error: ServiceError) -> bytes:
        """Return the bytes that end a stream which was begun with 200."""
        part_of(self._request, Refusals).note(self._scope, error)
        return encode_event(self._error(error), MESSAGE)

    def _error(self, error: ServiceError) -> bytes:
        ident = None if self._message.id is UNSET else self._message.id
        return msgspec.json.encode(rpc_error(error, self._scope["state"]["request_id"], ident))

    def _status(self, status: int) -> int:
        """Return with which status an answer goes out: in a session 404 says that it is gone."""
        is_kept = self._is_stateless or self._message.id is UNSET or status in (400, 404)
        return status if is_kept else 200

    async def _send_whole(self, status: int, body: bytes, headers: Any) -> None:
        told = [(name.encode(), value.encode()) for name, value in headers.items()]
        if body:
            told.append((b"content-type", b"application/json"))
        told.append((b"content-length", b"%d" % len(body)))
        await self._send({"type": "http.response.start", "status": status, "headers": told})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
