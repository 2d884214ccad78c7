# The API's description, /openapi.json. Litestar knows paths and what stands in them; bodies and queries are read by
# hand, so a handler names them: `takes` is the type of its body, `query` the names in its query, `options` the type of
# its headers.

from __future__ import annotations

import re
from functools import cache
from types import UnionType
from typing import Any, get_args

import msgspec
from litestar import Litestar
from litestar.handlers import HTTPRouteHandler
from msgspec import Struct

from gateway.accounts.guards import open_guard
from gateway.dialects.table import errors_at

SCHEMAS = "#/components/schemas/"
# How a caller authenticates: any of these headers, with a team's key, or an admin's.
SECURITY = {
    "key": {"type": "http", "scheme": "bearer", "description": "A team's key or an admin's."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same, Anthropic's way."},
    "api-key": {"type": "apiKey", "in": "header", "name": "api-key", "description": "The same, Azure's way."},
}
_CONVERTER = re.compile(r":\w+}")  # of {team_id:str}
_DECIMAL = b'{"type":"string","format":"decimal"}'  # as msgspec writes what it reads from numbers, too
_NUMBER = b'{"type":["number","string"]}'


@cache
def describe(app: Litestar) -> bytes:
    """Return the OpenAPI document of every route of ``app``, in JSON."""
    document = app.openapi_schema.to_schema()
    kinds: list[type[Struct]] = []
    for route in app.routes:
        for handler in getattr(route, "route_handlers", ()):
            path = document["paths"].get(_CONVERTER.sub("}", route.path), {})
            for method in handler.http_methods:
                if operation := path.get(method.lower()):
                    _complete(operation, handler, route.path)
                    kinds += [*_kinds(handler), errors_at(route.path).schema]
    _, schemas = msgspec.json.schema_components(kinds, ref_template=SCHEMAS + "{name}")
    components = {"schemas": schemas, "securitySchemes": SECURITY}
    return msgspec.json.encode({**document, "components": components}).replace(_DECIMAL, _NUMBER)


def _complete(operation: dict[str, Any], handler: HTTPRouteHandler, path: str) -> None:
    """Add to an operation what its handler reads by hand, which keys may call it, and how it fails."""
    if kinds := _kinds(handler):
        refs = [_ref(kind) for kind in kinds]
        body = {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}
        is_required = type(None) not in get_args(handler.opt["takes"])
        body_type = handler.opt.get("body_type", "application/json")
        operation["requestBody"] = {"required": is_required, "content": {body_type: body}}
    parameters = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in handler.opt.get("query", ())]
    if options := handler.opt.get("options"):
        schema = msgspec.json.schema(options)["$defs"][options.__name__]["properties"]
        parameters += [
            {"name": "x-" + name.replace("_", "-"), "in": "header", "schema": kind} for name, kind in schema.items()
        ]
        parameters.append({"name": "idempotency-key", "in": "header", "schema": {"type": "string", "maxLength": 255}})
    operation["parameters"] = operation.get("parameters", []) + parameters
    guard = (handler.guards or (open_guard,))[0]
    operation["security"] = [] if guard is open_guard else [{name: []} for name in SECURITY]
    # Litestar foresees bodies and errors of its own making; the answers are written by hand, and so are the errors.
    for answer in operation["responses"].values():
        answer["content"] = {kind: {"schema": {}} for kind in answer.get("content", {})}
        if len(kinds) == 1 and "stream" in kinds[0].__struct_fields__:
            answer["content"]["text/event-stream"] = {"schema": {}}
    operation["responses"].pop("400", None)
    error = _ref(errors_at(path).schema)
    operation["responses"]["default"] = {
        "description": "What is wrong, and what would be right",
        "content": {"application/json": {"schema": error}},
    }


def _kinds(handler: HTTPRouteHandler) -> list[type[Struct]]:
    """Return the types that a handler's body may be of."""
    takes = handler.opt.get("takes")
    kinds = get_args(takes) if isinstance(takes, UnionType) else (takes,)
    return [kind for kind in kinds if kind not in (None, type(None))]


def _ref(kind: type[Struct]) -> dict[str, str]:
    return {"$ref": SCHEMAS + kind.__name__}
