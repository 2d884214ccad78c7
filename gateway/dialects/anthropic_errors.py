# Errors in the shape of Anthropic's API, for its endpoints and for its clients wherever they call.

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from gateway.dialects.endpoint import ErrorShape
from protocol.errors import ServiceError

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
TOO_LONG = "prompt is too long"  # by these words alone clients know that they have to shorten it


def error_body(error: ServiceError, request_id: str) -> dict[str, Any]:
    """Return Anthropic's error object."""
    kind = ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    names_it = error.param is None or error.param in error.message
    message = error.message if names_it else f"{error.param}: {error.message}"
    if error.code == "context_length_exceeded" and TOO_LONG not in message:
        message = f"{TOO_LONG}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message, **error.facts}, "request_id": request_id}


class MessagesErrorDetails(Struct):
    type: str
    message: str
    model: str | UnsetType = UNSET  # where an upstream failed: which model,
    endpoint: str | UnsetType = UNSET  # and at which provider and region


class MessagesError(Struct):
    """An error of /v1/messages."""

    type: str
    error: MessagesErrorDetails
    request_id: str


ANTHROPIC_ERRORS = ErrorShape(
    body=error_body, schema=MessagesError, client_header="anthropic-version", id_header=b"request-id"
)
