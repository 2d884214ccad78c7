# What requests may say about the shape of their replies.

from __future__ import annotations

import json
from typing import Any

import pytest

from gpu_backend.server.requests.bodies import read_body
from gpu_backend.server.requests.checks import check_chat
from gpu_backend.server.requests.structured import MAX_TEXT, grammar_of
from gpu_backend.step.sampling_params import Grammar, GrammarKind
from protocol.chat import ChatRequest
from protocol.errors import BadRequest

SCHEMA = {"type": "object", "properties": {"a": {"const": "é"}}}
SCHEMA_FIELD = "response_format.json_schema.schema"
AS_TEXT = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA, ensure_ascii=False))


def asked(**fields: Any) -> tuple[Grammar | None, str | None]:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    request, extensions = read_body(json.dumps(body).encode(), ChatRequest)
    check_chat(request, extensions)
    return grammar_of(request, extensions)


@pytest.mark.parametrize(
    ("fields", "grammar", "field"),
    [
        ({}, None, None),
        ({"response_format": {"type": "text"}}, None, None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            AS_TEXT,
            "response_format",
        ),
        ({"guided_json": SCHEMA}, AS_TEXT, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, AS_TEXT, "guided_json"),
        ({"structured_outputs": {"json": SCHEMA}}, AS_TEXT, "structured_outputs.json"),
        ({"guided_regex": "a+"}, Grammar(GrammarKind.REGEX, "a+"), "guided_regex"),
        ({"guided_choice": ["a", "é"]}, Grammar(GrammarKind.CHOICE, '["a", "é"]'), "guided_choice"),
        ({"guided_grammar": 'start: "a"'}, Grammar(GrammarKind.LARK, 'start: "a"'), "guided_grammar"),
        ({"regex": "a+"}, Grammar(GrammarKind.REGEX, "a+"), "regex"),
        ({"ebnf": 'root ::= "a"'}, Grammar(GrammarKind.EBNF, 'root ::= "a"'), "ebnf"),
        (
            {"response_format": {"type": "json_object"}},
            Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}'),
            "response_format",
        ),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, AS_TEXT, "response_format"),
    ],
)
def test_every_way_to_ask_is_understood(fields: dict[str, Any], grammar: Grammar | None, field: str | None) -> None:
    """OpenAI's field, Together's, vLLM's and SGLang's, schemas as objects or as texts."""
    assert asked(**fields) == (grammar, field)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, SCHEMA_FIELD),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_json": '{"items":' * 20_000 + "{}" + "}" * 20_000}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a" * (MAX_TEXT + 1)}, "guided_regex"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_what_can_be_no_grammar_names_its_field(fields: dict[str, Any], param: str) -> None:
    """Two at once, nothing to choose from, no JSON, too much of it."""
    with pytest.raises(BadRequest) as caught:
        asked(**fields)

    assert (caught.value.status, caught.value.param) == (400, param)


def test_without_the_library_the_field_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal says what is missing; a request without structure is served."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(BadRequest) as caught:
        asked(guided_regex="a")

    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "guided_regex")
    assert asked() == (None, None)
