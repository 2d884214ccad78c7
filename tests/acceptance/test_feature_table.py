# The table of what goes through where, in docs/dialects.md: made here, by asking for each feature in each dialect of a
# model behind each format. `WRITE=1 pytest tests/acceptance/test_feature_table.py` writes it anew.

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.house import House
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.sounds import wav

PAGE = Path(__file__).parents[2] / "docs" / "dialects.md"
BEGIN, END = "<!-- made by tests/acceptance/test_feature_table.py -->\n", "<!-- end of the made table -->\n"
FORMATS = {"OpenAI": "small", "Anthropic": "claude", "Bedrock": "conversed", "Gemini": "gemini"}
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
COLUMNS = [(dialect, *each) for dialect in PATHS for each in FORMATS.items()] + [("responses", "Responses", "native")]
Body = dict[str, Any]
PNG, PDF = base64.b64encode(b"\x89PNG\r\n").decode(), base64.b64encode(b"%PDF-1.4").decode()
WAV = base64.b64encode(wav(seconds=1)).decode()
AUDIO: Body = {"type": "input_audio", "input_audio": {"data": WAV, "format": "wav"}}
SCHEMA: Body = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SCHEMA["additionalProperties"] = False
TOOL: Body = {"name": "weather", "parameters": SCHEMA}
IN_CHAT: Body = {"tools": [{"type": "function", "function": TOOL}]}
IN_MESSAGES: Body = {"tools": [{"name": "weather", "input_schema": SCHEMA}]}
IN_RESPONSES: Body = {"tools": [{"type": "function", **TOOL}]}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 1}


def said(content: Any) -> Body:
    return {"messages": [{"role": "user", "content": content}]}


def put(*parts: Body) -> Body:
    return {"input": [{"role": "user", "content": [*parts]}]}


def document(**more: Any) -> Body:
    source = {"type": "base64", "media_type": "application/pdf", "data": PDF}
    return said([{"type": "document", "source": source, **more}, {"type": "text", "text": "Hi"}])


# What is asked beside the model and a word, by feature and dialect.
FEATURES: dict[str, dict[str, Body]] = {
    "a word": {"chat": {}, "messages": {}, "responses": {}},
    "a stream": {name: {"stream": True} for name in PATHS},
    "instructions": {
        "chat": {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
        "messages": {"system": "Be brief."},
        "responses": {"instructions": "Be brief."},
    },
    "tools": {"chat": IN_CHAT, "messages": IN_MESSAGES, "responses": IN_RESPONSES},
    "a tool that must be called": {
        "chat": IN_CHAT | {"tool_choice": "required"},
        "messages": IN_MESSAGES | {"tool_choice": {"type": "any"}},
        "responses": IN_RESPONSES | {"tool_choice": "required"},
    },
    "one call at a time": {
        "chat": IN_CHAT | {"parallel_tool_calls": False},
        "messages": IN_MESSAGES | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        "responses": IN_RESPONSES | {"parallel_tool_calls": False},
    },
    "custom tools": {"responses": {"tools": [{"type": "custom", "name": "apply_patch"}]}},
    "tools in namespaces": {
        "responses": {"tools": [{"type": "namespace", "name": "city", "description": "A city.", **IN_RESPONSES}]}
    },
    "a schema": {
        "chat": {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}},
        "messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "responses": {"text": {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA}}},
    },
    "pictures": {
        "chat": said([{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}]),
        "messages": said([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}]),
        "responses": put({"type": "input_image", "image_url": f"data:image/png;base64,{PNG}", "detail": "auto"}),
    },
    "PDFs": {
        "chat": said(
            [{"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}}]
        ),
        "messages": document(),
        "responses": put(
            {"type": "input_file", "filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}
        ),
    },
    "audio": {"chat": said([AUDIO]), "responses": put(AUDIO)},
    "answers by voice": {
        "chat": {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}},
    },
    "citations": {"messages": document(citations={"enabled": True})},
    "thinking": {
        "chat": {"reasoning_effort": "low"},
        "messages": {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1024 + 500},
        "responses": {"reasoning": {"effort": "low"}},
    },
    "search of the web": {
        "chat": {"web_search_options": {}},
        "messages": {"tools": [SEARCH]},
        "responses": {"tools": [{"type": "web_search"}]},
    },
    "pages of the web, fetched there": {"messages": {"tools": [{"type": "web_fetch_20250910", "name": "web_fetch"}]}},
    "code, run there": {
        "messages": {"tools": [{"type": "code_execution_20250825", "name": "code_execution"}]},
        "responses": {"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]},
    },
    "files, searched there": {"responses": {"tools": [{"type": "file_search", "vector_store_ids": ["vs_all"]}]}},
    "MCP, called from there": {
        "messages": {"mcp_servers": [{"type": "url", "name": "a", "url": "https://mcp.example.com"}]},
        "responses": {"tools": [{"type": "mcp", "server_label": "a", "server_url": "https://mcp.example.com"}]},
    },
    "`temperature`": {name: {"temperature": 0.5} for name in PATHS},
    "`top_p`": {name: {"top_p": 0.5} for name in PATHS},
    "`top_k`": {"messages": {"top_k": 5}},
    "stop sequences": {"chat": {"stop": ["END"]}, "messages": {"stop_sequences": ["END"]}},
    "`seed`": {"chat": {"seed": 1}},
    "penalties": {"chat": {"presence_penalty": 0.5, "frequency_penalty": 0.5}},
    "`logit_bias`": {"chat": {"logit_bias": {"5": 1}}},
    "log probabilities": {
        "chat": {"logprobs": True, "top_logprobs": 2},
        "responses": {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    },
    "user": {"chat": {"user": "u"}, "messages": {"metadata": {"user_id": "u"}}, "responses": {"user": "u"}},
    "`verbosity`": {"chat": {"verbosity": "low"}, "responses": {"text": {"verbosity": "low"}}},
    "`prompt_cache_key`": {"chat": {"prompt_cache_key": "k"}, "responses": {"prompt_cache_key": "k"}},
    "`cache_control`": {
        "messages": {"system": [{"type": "text", "text": "B", "cache_control": {"type": "ephemeral"}}]}
    },
    "context management": {"messages": {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}},
}


def sign_of(client: httpx.Client, dialect: str, model: str, fields: Body) -> str:
    """Return ● for what goes through, ◐ for what is left out and told, ○ for what is refused by name."""
    asked: Body = {"model": model} | (
        put({"type": "input_text", "text": "Hi"}) if dialect == "responses" else said("Hi")
    )
    most = {"chat": "max_completion_tokens", "messages": "max_tokens", "responses": "max_output_tokens"}[dialect]
    answer = client.post(PATHS[dialect], json=asked | {most: 500} | fields)
    told = answer.headers.get("x-tollgate-dropped")
    assert answer.status_code in (200, 400), (dialect, model, fields, answer.text)
    return "○" if answer.status_code == 400 else "●" if told is None else "◐"


def made(client: httpx.Client) -> str:
    heads = [f"{dialect} at {spoken}" for dialect, spoken, _ in COLUMNS]
    lines = ["| | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(heads)]
    for feature, bodies in FEATURES.items():
        signs = [
            sign_of(client, dialect, model, bodies[dialect]) if dialect in bodies else "–"
            for dialect, _, model in COLUMNS
        ]
        lines.append(f"| {feature} | " + " | ".join(signs) + " |")
    return "\n".join(lines) + "\n"


def test_the_table_says_what_goes_through_where(house: House, upstream: ScriptedUpstream) -> None:
    """None of it is kept by hand: the page says what calls were answered."""
    upstream.forget()
    with house.client() as client:
        table = made(client)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    written, _, after = rest.partition(END)
    if os.environ.get("WRITE"):
        PAGE.write_text(before + BEGIN + table + END + after)
        pytest.skip("SKIPPED: written anew")

    assert written == table
    assert upstream.violations == []
