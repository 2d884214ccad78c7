# A JSON schema as Anthropic's models take it where they must keep to it: objects are closed, and what bounds a value is
# no rule that they can be held to. Such bounds are told to the model in words, as Anthropic's own packages do.

from __future__ import annotations

from typing import Any

from gateway.upstreams.wire.unsayable import told_in_words

Schema = dict[str, Any]

INNER = ("items",)  # keys that hold a schema
LISTS = ("anyOf", "allOf")  # keys that hold several
DEFINITIONS = ("$defs", "definitions")
NAMED = ("properties", *DEFINITIONS)  # keys that hold schemas by name
KEPT = {"type", "description", "title", "default", "enum", "const", "required", "additionalProperties"}
FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "uri", "ipv4", "ipv6", "uuid"}


def binding_schema(schema: Schema) -> Schema:
    """Return ``schema`` in the keywords that bind the model, with every other rule in its description."""
    found: Schema = {}
    rules: Schema = {}
    if "$ref" in schema:  # nothing stands beside it but what it may point to
        found["$ref"] = schema["$ref"]
        schema = {key: value for key, value in schema.items() if key in DEFINITIONS}
    for key, value in schema.items():
        match key, value:
            case "oneOf", list():
                found["anyOf"] = [_inner(each) for each in value]
            case _, list() if key in LISTS:
                found[key] = [_inner(each) for each in value]
            case _, dict() if key in NAMED:
                found[key] = {name: _inner(each) for name, each in value.items()}
            case _, dict() if key in INNER:
                found[key] = _inner(value)
            case _ if key in KEPT or (key == "format" and value in FORMATS) or (key == "minItems" and value in (0, 1)):
                found[key] = value
            case _ if not key.startswith("$"):  # $schema and its like say nothing of values
                rules[key] = value
    if is_object(found):
        found.setdefault("additionalProperties", False)
    return told_in_words(found, rules)


def is_object(schema: Schema) -> bool:
    """Whether a schema is of objects, be it beside other types."""
    kind = schema.get("type")
    return "properties" in schema if kind is None else "object" in (kind if isinstance(kind, list) else (kind,))


def is_open(schema: Any) -> bool:
    """Whether a schema has an object of fields that it does not name: closed, it would lose them."""
    if not isinstance(schema, dict):
        return False
    if is_object(schema) and schema.get("additionalProperties", "properties" not in schema) is not False:
        return True
    inner = [schema.get(key) for key in INNER]
    for key in ("oneOf", *LISTS, *NAMED):
        several = schema.get(key)
        inner += several.values() if isinstance(several, dict) else several if isinstance(several, list) else ()
    return any(map(is_open, inner))


def _inner(schema: Any) -> Any:
    return binding_schema(schema) if isinstance(schema, dict) else schema
