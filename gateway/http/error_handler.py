# The one handler that turns errors into answers; for a URL that no route has, with what to set: mostly its client has
# the wrong base URL, or speaks another API by default.

from __future__ import annotations

from typing import Any

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException, InternalServerException
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from billing.core.store_errors import is_without_schema, postgres_cannot_now
from gateway.core.errors import EncodedBody
from gateway.dialects.table import ENDPOINTS, errors_for
from gateway.http.exchange import LARGEST_BODY
from gateway.telemetry.refusals import Refusals
from protocol.errors import BadRequest, MethodNotAllowed, Overloaded, ServiceError, TooLarge, UnknownUrl

log = structlog.get_logger()


def render_error(request: Request[Any, Any, Any], exc: Exception) -> Response[bytes]:
    """Return the error object for any exception. What is not meant for callers is logged and named only by its id."""
    error = as_service_error(request, exc)
    request.app.state.parts.get(Refusals).note(request.scope, error)
    headers = dict(error.headers)
    if error.status in (429, 503) and "retry-after" not in headers and "x-should-retry" not in headers:
        headers["retry-after"] = "1"
    # Each API's own shape: clients of Anthropic's dialect get its errors, from a missing key on.
    errors = errors_for(request.scope["path"], request.headers)
    body = errors.body(error, request.scope["state"].get("request_id", ""))
    return Response(msgspec.json.encode(body), status_code=error.status, media_type="application/json", headers=headers)


def as_service_error(request: Request[Any, Any, Any], exc: Exception) -> ServiceError:
    """Return what a caller may know of ``exc``."""
    match exc:
        case BadRequest(code="invalid_json") if request.headers.get("content-encoding", "identity") != "identity":
            return EncodedBody("Send the body as it is: no content-encoding is read here.", param="content-encoding")
        case ServiceError() if not is_without_schema(exc.__cause__):  # of such one it would say that Postgres is away
            return exc
        case HTTPException(status_code=404 | 405) if request.url.path.endswith(GEMINIS):
            return UnknownUrl(unknown_url(request.method, request.url.path))
        case HTTPException(status_code=404):
            return UnknownUrl(unknown_url(request.method, request.scope["path"]))
        case HTTPException(status_code=405):
            allowed = (exc.headers or {}).get("allow", "")
            return MethodNotAllowed(
                f"Not allowed to {request.method} on {request.url.path}. It takes {allowed}.",
                headers={"allow": allowed},
            )
        case HTTPException(status_code=413):
            most = request.route_handler.resolve_request_max_body_size() or LARGEST_BODY
            return TooLarge(f"The body is longer than {most // 2**20} MiB, the most that is read.")
        case InternalServerException(detail="client disconnected prematurely"):
            return BadRequest("The client left before the end of its body.")  # no client reads it; not an error
        case HTTPException() if exc.status_code < 500:
            return ServiceError(exc.detail, status=exc.status_code, type="invalid_request_error")
        case OperationalError() | InterfaceError() | PoolTimeout() | ConnectionError() | TimeoutError():
            return _dependency_unavailable(exc)
        case _ if postgres_cannot_now(exc):
            return _dependency_unavailable(exc)
    request_id = request.scope["state"].get("request_id", "")
    is_schemas = is_without_schema(exc) or is_without_schema(exc.__cause__)
    remedy = {"remedy": "run `tollgate migrate`"} if is_schemas else {}
    log.error("unexpected_error", request_id=request_id, **remedy, exc_info=exc)
    return ServiceError(f"The gateway failed in an unexpected way. Mention the request id {request_id}.")


def _dependency_unavailable(exc: Exception) -> ServiceError:
    log.warning("dependency_unavailable", error=repr(exc))
    return Overloaded("A part of the gateway that this request needs does not answer in time. Try again.", 2)


NEIGHBOURS = "is not spoken here. Set the client to chat completions: POST /v1/chat/completions."
GEMINIS = (":generateContent", ":streamGenerateContent", ":countTokens", ":embedContent", ":batchEmbedContents")
NOT_SPOKEN = {"/assistants": f"The Assistants API {NEIGHBOURS}", "/threads": f"The Assistants API {NEIGHBOURS}"}
# What clients add to a base URL, some of them with the /v1.
KNOWN = (
    *(endpoint.path.removeprefix("/v1") for endpoint in ENDPOINTS),
    *(
        "/messages/batches",
        "/messages/count_tokens",
        "/responses/input_tokens",
        "/moderations",
        "/models",
        "/files",
        "/batches",
        "/batch",
        "/usage",
    ),
)


def unknown_url(method: str, path: str) -> str:
    """Return the message for a path that no route serves, with where its client should go instead."""
    return f"Unknown request URL: {method} {path}. {_advice(path)}"


def _advice(path: str) -> str:
    if path.endswith(GEMINIS):
        return f"Gemini's API {NEIGHBOURS}"
    parts = [part for part in path.split("/") if part]
    asked = "".join(f"/{part}" for part in parts if part != "v1")
    if asked not in KNOWN:
        for beginning, words in NOT_SPOKEN.items():
            if f"{asked}/".startswith(f"{beginning}/"):
                return words
    for known in KNOWN:
        if asked == known:
            fault = "ends without its /v1" if "v1" not in parts else "has one /v1 too many"
            return f"Is /v1{known} meant? The client's base URL {fault}."
        if asked.endswith(known):
            return f"Is /v1{known} meant? Base URLs end in /v1, or before it where a client adds it, as Anthropic's do."
    return "GET /openapi.json lists what there is."
