# Tools over HTTP, with a scripted engine behind the front: what reaches the model, and how its calls are answered.

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpu_backend.server.checkpoint.chat_template import ChatTemplate
from gpu_backend.server.checkpoint.checkpoint import load_checkpoint
from gpu_backend.server.checkpoint.tool_calls import ToolStyle
from gpu_backend.server.requests.tools import read_tools
from gpu_backend.step.grammar import GrammarCompiler
from gpu_backend.step.messages import Command, Event, FinishReason, Generate, NewTokens
from gpu_backend.step.sampling_params import Grammar, GrammarKind
from protocol.chat import ChatRequest, Tool
from protocol.decoding import convert
from tests.support.fake_engine import FakeEngine, speaking
from tests.support.front import CHAT, END, TEMPLATE, running_front, token_ids, write_small_files

# The parts of the public templates of Qwen 2.5 and Llama 3.1 that matter here, short enough for a context of 64 tokens.
HERMES = "{% if tools %}{{ tools[0].function.name }}<tool_call>{% endif %}" + TEMPLATE
LLAMA = """{% if tools %}{{ '{"name": x, "parameters": y}' }}{% endif %}{% if false %}ipython{% endif %}""" + TEMPLATE
ADD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
SUB: dict[str, Any] = {"type": "function", "function": {"name": "sub"}}
ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def http(engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = write_small_files(tmp_path_factory.mktemp("hermes"), HERMES)
    with running_front(folder, engine) as url, httpx.Client(base_url=url, timeout=10) as http:
        yield http


def asked(engine: FakeEngine, http: httpx.Client, text: str, chunk: int = 1, **fields: Any) -> Any:
    """Return the choice with which a model that says ``text`` is answered: a message, or what its chunks join to."""
    engine.script = speaking([*token_ids(text), END], FinishReason.STOP, chunk)
    engine.process.commands.clear()
    answer = http.post("/v1/chat/completions", json={**CHAT, "tools": [ADD, SUB], **fields})
    if not fields.get("stream"):
        return answer.json().get("error") or answer.json()["choices"][0]
    choices = [json.loads(line[6:])["choices"][0] for line in answer.text.split("\n\n")[:-2]]
    assert choices[0]["delta"] == {"role": "assistant", "content": None}  # it may be calls alone
    calls: list[dict[str, Any]] = []
    for choice in choices:
        for call in choice["delta"].get("tool_calls", []):
            if "id" in call:
                assert (call["type"], call["index"]) == ("function", len(calls))
                calls.append({"name": call["function"]["name"], "arguments": ""})
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    return {
        "content": "".join(choice["delta"].get("content") or "" for choice in choices),
        "calls": calls,
        "finish_reason": choices[-1]["finish_reason"],
    }


@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    "text", [f"Well. {ONE}", f"{ONE}\n{ONE}", "No call <tool_c", '<tool_call>{"name": "x"}', ONE[:40]]
)
def test_streamed_calls_are_those_of_the_plain_answer(
    engine: FakeEngine, http: httpx.Client, text: str, chunk: int
) -> None:
    """Content, names, arguments and the end are the same in chunks of any size."""
    plain = asked(engine, http, text, chunk)
    streamed = asked(engine, http, text, chunk, stream=True)

    calls = [call["function"] for call in plain["message"].get("tool_calls", [])]
    assert streamed["content"] == (plain["message"]["content"] or "")
    assert streamed["calls"] == calls
    assert streamed["finish_reason"] == plain["finish_reason"] == ("tool_calls" if calls else "stop")


def test_a_call_is_answered_in_openais_shape(engine: FakeEngine, http: httpx.Client) -> None:
    """No content beside it is null; the tools were shown to the model."""
    choice = asked(engine, http, ONE)
    (call,) = choice["message"]["tool_calls"]
    (command,) = [c for c in engine.process.commands if isinstance(c, Generate)]

    assert choice["message"]["content"] is None
    assert (call["type"], call["function"]) == ("function", {"name": "add", "arguments": '{"a": 1}'})
    assert call["id"].startswith("call_") and "index" not in call
    assert command.prompt_token_ids[:3] == tuple(token_ids("add"))
    assert command.sampling.grammar is None


def test_tools_are_shown_only_to_a_model_that_may_call_them(engine: FakeEngine, http: httpx.Client) -> None:
    """With ``none`` what looks like a call is text."""
    choice = asked(engine, http, ONE, tool_choice="none")
    (command,) = [c for c in engine.process.commands if isinstance(c, Generate)]

    assert (choice["message"]["content"], choice["finish_reason"]) == (ONE, "stop")
    assert command.prompt_token_ids == tuple(token_ids("<user>hi<assistant>"))


def test_one_call_is_told_where_several_are_unwanted(engine: FakeEngine, http: httpx.Client) -> None:
    """The reply ends with the first."""
    for stream in (False, True):
        answer = asked(engine, http, f"{ONE}\n{ONE}", parallel_tool_calls=False, stream=stream)
        calls = answer["calls"] if stream else answer["message"]["tool_calls"]

        assert (len(calls), answer["finish_reason"]) == (1, "tool_calls")


@pytest.mark.parametrize(
    ("choice", "start"),
    [("required", "call0 | call1"), ({"type": "function", "function": {"name": "sub"}}, "(call0)")],
)
def test_a_forced_call_has_a_grammar(engine: FakeEngine, http: httpx.Client, choice: Any, start: str) -> None:
    """What must be called is made to be; a schema is of answers in text, of which there is none then."""
    asked(engine, http, ONE, tool_choice=choice, response_format={"type": "json_object"})
    (command,) = [c for c in engine.process.commands if isinstance(c, Generate)]

    assert command.sampling.grammar is not None
    assert command.sampling.grammar.kind is GrammarKind.LARK
    assert start in command.sampling.grammar.text


@pytest.mark.parametrize("style", [ToolStyle.HERMES, ToolStyle.LLAMA])
def test_a_schema_binds_the_answer_and_leaves_the_calls(tmp_path: Path, style: ToolStyle) -> None:
    """A model that may call does so, or answers by the schema; it says nothing else. Arguments are any object,
    also where no grammar could bind them."""
    pytest.importorskip("llguidance")
    checkpoint = load_checkpoint(write_small_files(tmp_path, HERMES if style is ToolStyle.HERMES else LLAMA))
    unlike = {"type": "array", "uniqueItems": True, "description": "x" * 300_000}
    sort = {"type": "function", "function": {"name": "sort", "parameters": {"properties": {"a": unlike}}}}
    body = ChatRequest(model="tiny", messages=(), tools=convert([ADD, SUB, sort], tuple[Tool, ...]))
    answer = Grammar(
        GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": {"b": {}}, "additionalProperties": false}'
    )
    use = read_tools(body, checkpoint, answer)
    assert use is not None and use.style is style and use.grammar is not None
    compiled = GrammarCompiler(tmp_path, 260, frozenset({END})).compile(use.grammar).result()
    call = ONE if style is ToolStyle.HERMES else '{"name": "add", "parameters": {"a": 1}}'
    other = call.replace("add", "sort").replace("1", "[2, 2]")
    said = [call, other, '{"b": 1}', "{}", '{"c', "A", "["]

    assert [text for text in said if compiled.copy().accept(token_ids(text)) is None] == said[:4]


@pytest.mark.parametrize(("choice", "param"), [("auto", "response_format"), ("required", "tools")])
def test_a_grammar_that_cannot_be_followed_names_whose_it_is(
    engine: FakeEngine, http: httpx.Client, choice: str, param: str
) -> None:
    """Beside tools that may be called it is the answer's, else the tools'."""

    def refuse(command: Command) -> list[tuple[Event, ...]]:
        words = {"error": "it has 'not'", "is_bad_grammar": True}
        is_asked = isinstance(command, Generate)
        return [(NewTokens(command.request_id, 0, (), finish_reason=FinishReason.ERROR, **words),)] if is_asked else []

    engine.script = refuse
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}
    body = {**CHAT, "tools": [ADD], "tool_choice": choice, "response_format": schema}
    error = http.post("/v1/chat/completions", json=body).json()["error"]

    assert error["param"] == param and error["message"].startswith(f"'{param}' cannot be followed")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [ADD, ADD]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
        ({"tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    ],
)
def test_bad_tools_name_their_field(engine: FakeEngine, http: httpx.Client, fields: Any, param: str) -> None:
    """Each is a 400 before the engine hears of it."""
    assert asked(engine, http, "x", **fields)["param"] == param
    assert not engine.process.commands


def test_a_model_without_tools_refuses_them(tmp_path: Path) -> None:
    """A template that does not speak of tools cannot show them; earlier calls in the messages are no matter."""
    with running_front(write_small_files(tmp_path), FakeEngine(speaking([END], FinishReason.STOP))) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json={**CHAT, "tools": [ADD]}).json()["error"]
        unused = httpx.post(f"{url}/v1/chat/completions", json={**CHAT, "tools": [ADD], "tool_choice": "none"})

    assert (answer["code"], answer["param"]) == ("unsupported_parameter", "tools")
    assert unused.status_code == 200


def test_a_resumed_reply_goes_on_between_content_and_call(engine: FakeEngine, http: httpx.Client) -> None:
    """The reader of the resumed text has so many characters of content; the calls after it come whole."""
    resumed = {"resume_token_ids": token_ids("Well. <tool"), "resume_text_chars": 3}
    choice = asked(engine, http, ONE.removeprefix("<tool"), max_tokens=58, **resumed)

    assert choice["message"]["content"] == "l."
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_the_template_tells_the_style() -> None:
    """By the words in which it shows the model how to call; a style that is not read here is none."""
    assert ChatTemplate(HERMES, {}).tool_style is ToolStyle.HERMES
    assert ChatTemplate(LLAMA, {}).tool_style is ToolStyle.LLAMA
    assert ChatTemplate(TEMPLATE, {}).tool_style is None
    assert ChatTemplate("{{ tools }}<function=x>", {}).tool_style is None
