# What a request says about the shape of its reply: OpenAI's response_format, vLLM's fields of several ages, and
# SGLang's.

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

from gpu_backend.server.requests.bodies import Extensions, StructuredOutputs
from gpu_backend.step.sampling_params import Grammar, GrammarKind
from protocol.chat import ChatRequest, JsonObjectFormat, JsonSchemaFormat
from protocol.completions import CompletionRequest
from protocol.errors import UnsupportedParameter, invalid_param

ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
MAX_TEXT = 256 * 1024  # characters of a schema, an expression, all choices together


def grammar_of(body: ChatRequest | CompletionRequest, extensions: Extensions) -> tuple[Grammar | None, str | None]:
    """Return the grammar that the reply must follow, and the field that asks for it.

    Raises ``BadRequest`` for two of them and for what can be none; whether it can be followed is the engine's to say.
    """
    found = list(_all_grammars(body, extensions))
    if not found:
        return None, None
    (grammar, field), *others = found
    if others:
        raise invalid_param(
            others[0][1], f"'{field}' and '{others[0][1]}' both say what the reply looks like. Send one."
        )
    if len(grammar.text) > MAX_TEXT:
        raise invalid_param(field, f"'{field}' has {len(grammar.text)} characters; it has at most {MAX_TEXT}.")
    if importlib.util.find_spec("llguidance") is None:
        raise UnsupportedParameter(
            f"This engine was installed without llguidance, which '{field}' needs. Leave it out.", param=field
        )
    return grammar, field


def _all_grammars(body: ChatRequest | CompletionRequest, extensions: Extensions) -> Iterator[tuple[Grammar, str]]:
    form = body.response_format if isinstance(body, ChatRequest) else None
    match form.in_openais_words() if isinstance(form, JsonObjectFormat) else form:
        case JsonObjectFormat():
            yield ANY_OBJECT, "response_format"
        case JsonSchemaFormat(json_schema):
            if json_schema.schema is None:
                field = "response_format.json_schema.schema"
                raise invalid_param(field, f"'{field}' is missing; it holds the JSON Schema.")
            yield _schema(json_schema.schema, "response_format"), "response_format"
    older = StructuredOutputs(
        extensions.guided_json, extensions.guided_regex, extensions.guided_choice, extensions.guided_grammar
    )
    yield from _grammars(older, "guided_")
    if extensions.structured_outputs is not None:
        yield from _grammars(extensions.structured_outputs, "structured_outputs.")
    yield from _grammars(StructuredOutputs(regex=extensions.regex), "")
    if extensions.ebnf is not None:
        yield Grammar(GrammarKind.EBNF, extensions.ebnf), "ebnf"


def _grammars(asked: StructuredOutputs, prefix: str) -> Iterator[tuple[Grammar, str]]:
    if asked.json is not None:
        yield _schema(asked.json, prefix + "json"), prefix + "json"
    if asked.regex is not None:
        yield Grammar(GrammarKind.REGEX, asked.regex), prefix + "regex"
    if asked.choice is not None:
        if not asked.choice:
            raise invalid_param(prefix + "choice", f"'{prefix}choice' is empty; it holds the texts to choose from.")
        yield Grammar(GrammarKind.CHOICE, json.dumps(asked.choice, ensure_ascii=False)), prefix + "choice"
    if asked.grammar is not None:
        yield Grammar(GrammarKind.LARK, asked.grammar), prefix + "grammar"
    if asked.json_object:
        yield ANY_OBJECT, prefix + "json_object"


def _schema(schema: str | dict[str, Any], field: str) -> Grammar:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as exc:
            raise invalid_param(field, f"'{field}' is a text that is not JSON, or nested too deeply: {exc}.") from exc
    if not isinstance(schema, dict):
        raise invalid_param(field, f"'{field}' is no JSON object; a JSON Schema is one.")
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))
