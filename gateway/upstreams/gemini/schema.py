# A JSON schema as Gemini takes it: a part of JSON Schema's words. Every other rule is told to the model in words, in
# the description of what it is about, so that nothing of a schema is lost.

from __future__ import annotations

from typing import Any

from gateway.upstreams.wire.unsayable import told_in_words

Schema = dict[str, Any]

# Google, "Structured output": the words of JSON Schema that bind the model.
KEPT = frozenset(
    {"type", "format", "title", "description", "enum", "required", "propertyOrdering", "additionalProperties"}
    | {"minItems", "maxItems", "minimum", "maximum", "$ref", "$id", "$anchor"}
)
INNER = ("items", "additionalProperties")  # words that hold a schema
LISTS = {"anyOf": "anyOf", "oneOf": "anyOf", "prefixItems": "prefixItems"}  # words that hold several, and Gemini's
NAMED = {"properties": "properties", "$defs": "$defs", "definitions": "$defs"}  # words that hold schemas by name
SILENT = ("$schema", "$comment", "default", "examples")  # that bind no value


def gemini_schema(schema: Schema) -> Schema:
    """Return ``schema`` in Gemini's words."""
    found: Schema = {}
    rules: Schema = {}
    for key, value in schema.items():
        match key, value:
            case "const", _:
                found["enum"] = [value]
            case "$ref", str():
                found["$ref"] = value.replace("#/definitions/", "#/$defs/")
            case _, dict() if key in INNER:
                found[key] = gemini_schema(value)
            case _, list() if key in LISTS:
                found[LISTS[key]] = [gemini_schema(each) if isinstance(each, dict) else each for each in value]
            case _, dict() if key in NAMED:
                inner = {name: gemini_schema(each) if isinstance(each, dict) else each for name, each in value.items()}
                found[NAMED[key]] = inner
            case _ if key in KEPT:
                found[key] = value
            case _ if key not in SILENT:
                rules[key] = value
    return told_in_words(found, rules)
