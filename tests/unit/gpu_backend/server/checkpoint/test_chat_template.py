# Chat templates render as transformers renders them.

from __future__ import annotations

import copy
import datetime
import json
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer, models

from gpu_backend.server.checkpoint.chat_template import ChatTemplate, read_template
from gpu_backend.server.checkpoint.tool_calls import ToolCallReader
from protocol.chat import Message, Tool
from protocol.errors import BadRequest
from tests.support.chat_templates import FAMILIES, LLAMA, QWEN_2_5
from tools.demo_training.tokenizer import CHAT_TEMPLATE as DEMO

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
LLAMA_2 = """{% for message in messages %}
    {% if message['role'] == 'user' %}
        {{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
        {{ ' ' + message['content'] + eos_token }}
    {% endif %}
{% endfor %}"""
STRICT = """{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('Conversation roles must alternate user/assistant') -}}
{%- endif -%}
{%- if loop.index0 > 8 -%}{%- break -%}{%- endif -%}
<{{ message.role }}>{{ message.content | tojson }}
{%- endfor -%}
{%- if add_generation_prompt -%}<assistant>{%- endif -%}
{%- if tools is not none -%}tools{%- endif -%}"""
TOOLS = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"  # noqa: E501

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "  hi <there> & 'you' \n"}],
    [{"role": "user", "content": "é 😀"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "go"}],
]


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Tells the weather <now> & "there", für Köln',
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string"}, "days": {"type": ["integer", "null"]}},
            "required": ["town"],
        },
    },
}
ADD_PARAMETERS = {"type": "object", "properties": {"b": {"type": "number"}, "a": {"type": "array", "items": {}}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": ADD_PARAMETERS}}


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def calling(content: str | None, **arguments: Any) -> dict[str, Any]:
    """An assistant's turn that calls functions by name, with ids of nine letters, as Mistral's have."""
    calls = [
        {"id": f"{name:x>9}", "type": "function", "function": {"name": name, "arguments": json.dumps(value)}}
        for name, value in arguments.items()
    ]
    return turn("assistant", content, tool_calls=calls)


def result(name: str, content: str) -> dict[str, Any]:
    return turn("tool", content, tool_call_id=f"{name:x>9}", name=name)


SYSTEM, ASK, ANSWER, AGAIN = (
    turn("system", " Be brief. "),
    turn("user", "  Wie ist es in Köln? <b>&'\" 😀\n"),
    turn("assistant", "<think>\nhm\n</think>\n\nDry.\n"),
    turn("user", "And in Rome?"),
)
ONE = [calling(None, weather={"town": "Köln 😀", "days": None}), result("weather", '{"t": 3, "s": "\'"}')]
TWO = [
    calling("", weather={"town": "Rome"}, add={"b": 1.5, "a": [None, True, {"é": "<"}]}),
    result("weather", "rain"),
    result("add", "3"),
]
WITH_TOOLS: dict[str, list[dict[str, Any]]] = {
    "question": [ASK],
    "system": [SYSTEM, ASK],
    "turns": [SYSTEM, ASK, ANSWER, AGAIN],
    "call": [SYSTEM, ASK, *ONE],
    "text beside a call": [ASK, calling("I look.", weather={"town": "Rome"}), result("weather", "")],
    "answered call": [SYSTEM, ASK, *ONE, ANSWER, AGAIN],
    "two calls": [ASK, *TWO],
    "two calls after one": [SYSTEM, ASK, *ONE, *TWO, ANSWER, AGAIN],
    "empty": [turn("user", ""), turn("assistant", ""), turn("user", "")],
}


def messages(plain: list[dict[str, Any]]) -> list[Message]:
    return msgspec.convert(plain, list[Message])


def as_transformers(source: str, conversation: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    """Render with transformers, which takes arguments as objects, and no null."""
    conversation = copy.deepcopy(conversation)
    for message in conversation:
        message["content"] = message["content"] or ""
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return oracle().apply_chat_template(
        conversation, tools=tools, chat_template=source, tokenize=False, add_generation_prompt=True
    )


@cache
def compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source, TOKENS)


@cache
def oracle() -> Any:
    from transformers import PreTrainedTokenizerFast  # a second, for runs of these tests alone

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **TOKENS)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("source", [LLAMA_2, STRICT, DEMO], ids=["llama-2", "strict", "demo"])
def test_templates_render_as_transformers_does(source: str, conversation: list[dict[str, Any]]) -> None:
    """Whitespace control, filters, special tokens and the generation prompt agree to the letter."""
    assert compiled(source).render(messages(conversation)) == as_transformers(source, conversation)


@pytest.mark.parametrize("conversation", WITH_TOOLS.values(), ids=WITH_TOOLS.keys())
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tools", [None, [WEATHER], [WEATHER, ADD]], ids=["no tool", "a tool", "two tools"])
def test_families_render_as_transformers_does(
    family: str, conversation: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    """With tools, calls and results, to the letter; what a template itself refuses there is refused here, or mended."""
    source = FAMILIES[family]
    asked = messages(conversation), msgspec.convert(tools or [], list[Tool])
    if source is LLAMA and any(len(message.get("tool_calls", ())) > 1 for message in conversation):
        with pytest.raises(TemplateError, match="one call a turn"):
            as_transformers(source, conversation, tools)
        assert compiled(source).render(*asked)
        return

    assert compiled(source).render(*asked) == as_transformers(source, conversation, tools)


def test_several_calls_of_a_turn_are_told_one_by_one_where_a_template_takes_one() -> None:
    """What a Llama said in one turn can be sent back to it: each call with its result."""
    told = [ASK, calling("", weather={"town": "Rome"}), result("weather", "rain")]
    told += [calling("", add={"b": 1.5, "a": [None, True, {"é": "<"}]}), result("add", "3")]
    shuffled = [ASK, TWO[0], TWO[2], TWO[1]]

    rendered = [ChatTemplate(LLAMA, TOKENS).render(messages(some)) for some in ([ASK, *TWO], shuffled, told)]
    assert rendered[0] == rendered[1] == rendered[2] == as_transformers(LLAMA, told)


@pytest.mark.parametrize("family", ["llama", "qwen-2.5", "qwen-3", "hermes"])
def test_calls_are_read_as_their_template_writes_them(family: str) -> None:
    """In any pieces: of many sizes, and cut in two at every place."""
    calls = [calling("", weather={"town": 'Rome </tool_call> "} 😀'}), calling("", add={"a": [], "b": {"c": {}}})]
    conversation = [ASK, calls[0]] if family == "llama" else [ASK, calling("", **_arguments(*calls))]
    template = ChatTemplate(FAMILIES[family], TOKENS)
    before = template.render(messages([ASK]))
    text = (
        template.render(messages([*conversation, AGAIN]))
        .removeprefix(before)
        .split("<|im_end|>")[0]
        .split("<|eot_id|>")[0]
    )
    pieces = [[text[i : i + size] for i in range(0, len(text), size)] for size in range(1, 20)]
    pieces += [[text[:at], text[at:]] for at in range(1, len(text))]

    assert template.tool_style is not None
    expected = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for message in conversation[1:]
        for call in message["tool_calls"]
    ]
    for cut in pieces:
        ids = count()
        reader = ToolCallReader(template.tool_style, ("weather", "add"), lambda ids=ids: str(next(ids)))
        said = [*map(reader.feed, cut), reader.finish()]
        read = {str(i): ["", ""] for i in range(reader.num_calls)}
        for delta in (delta for one in said for delta in one.calls):
            read[str(delta.index)][0] += delta.name or ""
            read[str(delta.index)][1] += delta.arguments
        assert "".join(one.content for one in said) == ""
        assert [(name, json.loads(arguments)) for name, arguments in read.values()] == expected


def _arguments(*turns: dict[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for message in turns for call in message["tool_calls"]]
    return {call["name"]: json.loads(call["arguments"]) for call in calls}


def test_developers_speak_as_the_system_where_a_template_knows_none() -> None:
    """Many leave out turns of roles that they do not know."""
    developer = [turn("developer", "Be brief."), ASK]
    knowing = "{% for m in messages %}{{ 'D' if m.role == 'developer' else m.role }}{% endfor %}"

    rendered = ChatTemplate(QWEN_2_5, TOKENS).render(messages(developer))
    assert rendered == as_transformers(QWEN_2_5, [turn("system", "Be brief."), ASK])
    assert ChatTemplate(knowing, TOKENS).render(messages(developer)) == "Duser"


def test_parts_of_text_are_joined() -> None:
    """Templates that add strings meet strings, however the client wrote the content."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}]

    assert ChatTemplate(LLAMA_2, TOKENS).render(messages(parts)).strip() == "<s>[INST] one two [/INST]"


def test_images_are_refused_where_they_stand() -> None:
    """The model reads text; the refusal points at the part."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    with pytest.raises(BadRequest) as caught:
        ChatTemplate(DEMO, TOKENS).render(messages([{"role": "user", "content": [image]}]))

    assert (caught.value.param, caught.value.code) == ("messages[0].content[0]", "unsupported_parameter")


def test_what_a_template_refuses_is_a_bad_request() -> None:
    """A template's own exception reaches the caller in the template's words."""
    with pytest.raises(BadRequest, match="must alternate"):
        ChatTemplate(STRICT, TOKENS).render(messages([{"role": "assistant", "content": "hi"}]))


def test_arguments_of_tool_calls_are_objects_to_the_template() -> None:
    """The wire has them as a JSON text; templates write them with tojson."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turn = [{"role": "assistant", "content": None, "tool_calls": [call]}]

    assert ChatTemplate(TOOLS, TOKENS).render(messages(turn)) == '{"a": 1}'


def test_results_of_tools_have_the_name_of_their_call() -> None:
    """Templates of the Hermes family refuse results without one, and OpenAI's clients send none."""
    source = (
        "{% for m in messages if m.role == 'tool' %}{% if m.name is not defined %}{{ raise_exception('no name') }}"
        "{% endif %}{{ m.name }}={{ m.content }};{% endfor %}"
    )
    calls = [{"id": i, "type": "function", "function": {"name": f"f{i}", "arguments": "{}"}} for i in "ab"]
    results = [{"role": "tool", "tool_call_id": i, "content": i.upper()} for i in "ba"]
    named = {"role": "tool", "tool_call_id": "a", "name": "own", "content": "C"}
    turn = [{"role": "assistant", "content": None, "tool_calls": calls}, *results, named]

    assert ChatTemplate(source, TOKENS).render(messages(turn)) == "fb=B;fa=A;own=C;"
    with pytest.raises(BadRequest, match="no name"):
        ChatTemplate(source, TOKENS).render(messages([{"role": "tool", "tool_call_id": "z", "content": ""}]))


def test_templates_run_in_a_sandbox() -> None:
    """A checkpoint from elsewhere cannot reach Python through its template."""
    with pytest.raises(BadRequest):
        ChatTemplate("{{ messages.__class__.__mro__ }}", TOKENS).render(messages(CONVERSATIONS[0]))


def test_templates_may_write_the_date() -> None:
    """strftime_now is the engine's local time."""
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime.datetime(2026, 4, 5))

    assert template.render(messages(CONVERSATIONS[0])) == "05 Apr 2026"


def test_a_faulty_template_is_found_at_the_start() -> None:
    """Not at the first request."""
    with pytest.raises(ValueError, match="does not compile"):
        ChatTemplate("{% for %}", TOKENS)


def test_the_template_file_goes_before_the_tokenizers_settings(tmp_path: Path) -> None:
    """Newer checkpoints keep the template in a file of its own; older ones several under names."""
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]

    assert read_template(tmp_path, {}) is None
    assert read_template(tmp_path, {"chat_template": "s"}) == "s"
    assert read_template(tmp_path, {"chat_template": named}) == "d"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of a processor"}')
    assert read_template(tmp_path, {"chat_template": "s"}) == "of a processor"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert read_template(tmp_path, {"chat_template": "s"}) == "file"
