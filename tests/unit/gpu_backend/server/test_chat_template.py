# Chat templates render as transformers renders them.

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from gpu_backend.demo_model.tokenizer import CHAT_TEMPLATE as DEMO
from gpu_backend.server.chat_template import ChatTemplate, read_template
from protocol.chat import Message
from protocol.errors import BadRequest

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


def messages(plain: list[dict[str, Any]]) -> list[Message]:
    return msgspec.convert(plain, list[Message])


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("source", [LLAMA_2, STRICT, DEMO], ids=["llama-2", "strict", "demo"])
def test_templates_render_as_transformers_does(source: str, conversation: list[dict[str, Any]]) -> None:
    """Whitespace control, filters, special tokens and the generation prompt agree to the letter."""
    oracle = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=source, **TOKENS)
    expected = oracle.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)

    assert ChatTemplate(source, TOKENS).render(messages(conversation)) == expected


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
    (tmp_path / "chat_template.jinja").write_text("file")
    assert read_template(tmp_path, {"chat_template": "s"}) == "file"
