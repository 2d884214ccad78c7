# The table of inference endpoints, and how a row is found. HTTP, batches, /v1/route, /openapi.json and errors read it:
# another endpoint is another dialect's file and a row here.

from __future__ import annotations

from collections.abc import Collection, Mapping

from gateway.dialects import chat, completions, embeddings, media, messages, responses
from gateway.dialects.checks import require
from gateway.dialects.endpoint import OPENAI_ERRORS, RPC_ERRORS, ApiEndpoint, ErrorShape

ENDPOINTS: tuple[ApiEndpoint, ...] = (
    chat.ENDPOINT,
    completions.ENDPOINT,
    embeddings.ENDPOINT,
    embeddings.RERANK,
    media.PICTURES,
    media.EDITS,
    media.SPEECH,
    media.TRANSCRIPTIONS,
    media.TRANSLATIONS,
    messages.ENDPOINT,
    responses.ENDPOINT,
    responses.COMPACT_ENDPOINT,
)
BY_NAME = {endpoint.name: endpoint for endpoint in ENDPOINTS}
FOR_BATCHES = {endpoint.path: endpoint for endpoint in ENDPOINTS if endpoint.is_for_batches}

# Beside the rows: conversations by voice, over WebSockets, each of whose responses is a call.
REALTIME, REALTIME_PATH = "realtime", "/v1/realtime"

FIELDS = frozenset(name for row in ENDPOINTS for name in row.body_type.__struct_encode_fields__)

_ROUTE_FIELDS = tuple(dict.fromkeys(endpoint.route_field for endpoint in ENDPOINTS if endpoint.route_field))
_OTHER_ERRORS = (
    *((row.path, row.errors) for row in ENDPOINTS if row.errors is not OPENAI_ERRORS),
    ("/mcp/", RPC_ERRORS),
)


def endpoint_of_body(fields: Collection[str], headers: Mapping[str, str]) -> ApiEndpoint:
    """Return the endpoint that a body with these ``fields`` is for: by the field that only its kind has, and among
    endpoints of one field by the header of an API's clients or by another field. Raises BadRequest."""
    found = [name for name in _ROUTE_FIELDS if name in fields]
    known = " and ".join((", ".join(f"'{name}'" for name in _ROUTE_FIELDS[:-1]), f"'{_ROUTE_FIELDS[-1]}'"))
    require(len(found) == 1, "messages", f"Give the body of a request: one of {known}.")
    rows = [endpoint for endpoint in ENDPOINTS if endpoint.route_field == found[0]]
    by_header = (row for row in rows if row.errors.client_header in headers)
    by_sign = (row for row in rows if not row.route_signs.isdisjoint(fields))
    return next(by_header, None) or next(by_sign, rows[0])


def errors_at(path: str) -> ErrorShape:
    """Return how errors are told at a path: an endpoint's own and whatever lies below it."""
    for beginning, errors in _OTHER_ERRORS:
        if path.startswith(beginning):
            return errors
    return OPENAI_ERRORS


def errors_for(path: str, headers: Mapping[str, str]) -> ErrorShape:
    """Return how errors are told to a caller: as the path has it, or as the API that its client always names."""
    for beginning, errors in _OTHER_ERRORS:
        if path.startswith(beginning) or (errors.client_header or "") in headers:
            return errors
    return OPENAI_ERRORS
