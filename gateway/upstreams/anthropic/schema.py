# A JSON schema as Anthropic's models take it where they must keep to it: objects are closed, and what bounds a value is
# no rule that they can be held to. Such bounds are told to the model in words, as Anthropic's own packages do.

from __future__ import annotations

from typing import Any

import msgspec

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
    if found.get("type") == "object":
        found.setdefault("additionalProperties", False)
    if rules:
        words = ", ".join(f"{key}: {_text(value)}" for key, value in rules.items())
        found["description"] = f"{found['description']} ({words})" if found.get("description") else f"({words})"
    return found


def _inner(schema: Any) -> Any:
    return binding_schema(schema) if isinstance(schema, dict) else schema


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
