# Tool calls from a real engine with a tiny random model, by the stock client: whatever the weights say, a call that is
# forced is one.

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.support.engine_server import running_engine_server
from tests.support.tiny_model import CHAT_TEMPLATE, TinyModel, write_tiny_model

TEMPLATES = {
    "hermes": "{% for tool in tools or [] %}{{ tool.function.name }}<tool_call>{% endfor %}" + CHAT_TEMPLATE,
    "llama": "{% if tools %}{\"name\": x, \"parameters\": y}{# ipython #}{% endif %}" + CHAT_TEMPLATE,
}  # fmt: skip
QUESTION: list[Any] = [{"role": "user", "content": "How wide is the gate?"}]
SIZE = {"type": "integer", "minimum": 0, "maximum": 999}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {field: SIZE, "unit": {"enum": ["m", "ft"]}},
                "required": [field, "unit"],
                "additionalProperties": False,
            },
        },
    }
    for name, field in (("open_gate", "width"), ("lift_bar", "height"))
]


@pytest.fixture(scope="module", params=["hermes", pytest.param("llama", marks=pytest.mark.soak)])
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    folder = tmp_path_factory.mktemp(request.param)
    write_tiny_model(folder, TinyModel(max_position=1024), with_tokenizer=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATES[request.param]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with running_engine_server(folder) as server:
        with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
            yield client


def ask(client: OpenAI, **more: Any) -> Any:
    asked = {"model": "tiny", "messages": QUESTION, "tools": TOOLS, "max_tokens": 400, "temperature": 1.3, **more}
    return client.chat.completions.create(**asked)


@pytest.mark.parametrize("name", [None, "lift_bar"])
def test_a_forced_call_follows_its_schema_streamed_or_not(client: OpenAI, name: str | None) -> None:
    """Required or by name, each reply is a call whose arguments are what the tool takes."""
    choice: Any = {"type": "function", "function": {"name": name}} if name else "required"
    asked = {"tool_choice": choice, "parallel_tool_calls": False, "seed": 5, "n": 3}
    replies = ask(client, **asked).choices
    streamed: list[list[str]] = [["", ""] for _ in replies]
    for chunk in ask(client, stream=True, **asked):
        for part in chunk.choices:
            for call in part.delta.tool_calls or []:
                streamed[part.index][0] += call.function.name or ""
                streamed[part.index][1] += call.function.arguments or ""

    for reply, pieces in zip(replies, streamed, strict=True):
        (call,) = reply.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert (reply.message.content, reply.finish_reason) == (None, "tool_calls")
        assert call.function.name == (name or call.function.name)
        assert sorted(arguments) == sorted(["unit", {"open_gate": "width", "lift_bar": "height"}[call.function.name]])
        assert pieces == [call.function.name, call.function.arguments]


def test_without_force_the_model_may_answer_in_text(client: OpenAI) -> None:
    """Random weights call nothing; results of earlier calls are messages like others."""
    earlier = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "open_gate", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3 m"},
    ]

    asked: Any = {"tool_choice": "auto", "max_tokens": 20, "extra_body": {"ignore_eos": True}}
    reply = ask(client, messages=[*QUESTION, *earlier], **asked).choices[0]

    assert (reply.message.tool_calls, reply.finish_reason) == (None, "length")
    assert reply.message.content


def test_a_schema_that_no_call_can_follow_is_a_400(client: OpenAI) -> None:
    """It names the tools; without force the same schema is only shown to the model."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "nonsense"}}}}}]

    assert ask(client, tools=tools, max_tokens=5).choices
    with pytest.raises(Exception, match="nonsense") as caught:
        ask(client, tools=tools, tool_choice="required")
    assert getattr(caught.value, "param", None) == "tools"
