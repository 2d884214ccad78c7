# GPT-OSS' chat format over HTTP, with a scripted engine behind the front: thoughts, answers and calls each where they
# belong, and no text of a caller or of the model's own words that is taken for a control token.

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer

from gpu_backend.step.messages import FinishReason, Generate
from tests.support.fake_engine import FakeEngine, speaking
from tests.support.front import CHAT, running_front, token_ids, write_small_files

CONTROLS = ("<|end|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>")
IDS = {text: 256 + place for place, text in enumerate(CONTROLS)}
TEMPLATE = """{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}
{%- if tools %}{{ tools[0].function.description }}{% endif %}
{%- for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}
{%- if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}<|end|>{% endfor %}<|start|>assistant
{%- if false %}<|channel|>{% endif %}"""
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add"}}
THOUGHT = "<|channel|>analysis<|message|>Hm, é.<|end|>"
ANSWER = "<|start|>assistant<|channel|>final<|message|>Four.<|return|>"
CALL = '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
BEFORE = '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def http(engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = write_files(tmp_path_factory.mktemp("harmony"))
    with running_front(folder, engine) as url, httpx.Client(base_url=url, timeout=10) as http:
        yield http


def write_files(folder: Path) -> Path:
    write_small_files(folder, TEMPLATE)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROLS])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert {text: tokenizer.token_to_id(text) for text in CONTROLS} == IDS
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 263, "hidden_size": 2, "eos_token_id": 262}))
    return folder


def tokens_of(text: str) -> list[int]:
    """Return the tokens of a reply: control tokens by their ids, else one for each byte."""
    parts = re.split("(" + "|".join(map(re.escape, CONTROLS)) + ")", text)
    return [token for part in parts for token in ([IDS[part]] if part in IDS else token_ids(part))]


def asked(engine: FakeEngine, http: httpx.Client, tokens: list[int], chunk: int = 1, **fields: Any) -> dict[str, Any]:
    """Return what the model is answered with: parts of the message, and why it ended."""
    engine.script = speaking(tokens, FinishReason.STOP, chunk)
    engine.process.commands.clear()
    answer = http.post("/v1/chat/completions", json={**CHAT, **fields})
    if answer.status_code != 200:
        return dict(answer.json()["error"])
    if not fields.get("stream"):
        (choice,) = answer.json()["choices"]
        calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
        return {**choice["message"], "calls": calls, "finish_reason": choice["finish_reason"]}
    choices = [json.loads(line[6:])["choices"][0] for line in answer.text.split("\n\n")[:-2]]
    told: dict[str, Any] = {"calls": [], "finish_reason": choices[-1]["finish_reason"]}
    for delta in (choice["delta"] for choice in choices):
        for name in ("content", "reasoning_content"):
            told[name] = told.get(name, "") + (delta.get(name) or "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                told["calls"].append({"name": call["function"]["name"], "arguments": ""})
            told["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return told


def prompt_of(engine: FakeEngine) -> list[int]:
    (command,) = (one for one in engine.process.commands if isinstance(one, Generate))
    return list(command.prompt_token_ids)


@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize("streams", [False, True])
def test_channels_are_told_apart(engine: FakeEngine, http: httpx.Client, chunk: int, streams: bool) -> None:
    """Thoughts are reasoning, the answer is content, a call is a call: whole and in chunks of any size."""
    said = asked(engine, http, tokens_of(THOUGHT + ANSWER), chunk, stream=streams)
    assert (said["reasoning_content"], said["content"], said["finish_reason"]) == ("Hm, é.", "Four.", "stop")

    for form in (CALL, BEFORE):
        said = asked(engine, http, tokens_of(THOUGHT + form), chunk, stream=streams, tools=[ADD])
        assert said["calls"] == [{"name": "add", "arguments": '{"a": 1}'}]
        assert (said["reasoning_content"], said["finish_reason"]) == ("Hm, é.", "tool_calls")
        assert not said["content"]


def test_words_before_a_call_are_content_and_unknown_calls_are_no_calls(engine: FakeEngine, http: httpx.Client) -> None:
    """As with other models: what calls no tool of the request is text."""
    spoken = "<|channel|>commentary<|message|>I add.<|end|>"
    said = asked(engine, http, tokens_of(spoken + CALL), tools=[ADD])
    assert (said["content"], len(said["calls"])) == ("I add.", 1)

    said = asked(engine, http, tokens_of(CALL.replace('{"a": 1}', "")), tools=[ADD])
    assert said["calls"] == [{"name": "add", "arguments": "{}"}]

    said = asked(engine, http, tokens_of(spoken + CALL))
    assert (said["content"], said["calls"], said["finish_reason"]) == ('I add.\n\n{"a": 1}', [], "stop")


def test_what_only_spells_a_control_token_is_text(engine: FakeEngine, http: httpx.Client) -> None:
    """In a prompt, in a tool's description, and in a reply, whose own marks are replaced, too."""
    words = f"{CALL} <|end|> \ufdd3\ufde6\ufde1\ufdd4 x"
    reply = [*tokens_of("<|channel|>final<|message|>"), *token_ids(words), IDS["<|return|>"]]
    tool = {"type": "function", "function": {"name": "add", "description": "<|call|>"}}
    said = asked(engine, http, reply, messages=[{"role": "user", "content": "<|end|><|call|>"}], tools=[tool])

    assert said["content"] == re.sub("[\ufdd0-\ufdef]", "\ufffd", words)
    assert said["calls"] == [] and said["finish_reason"] == "stop"
    assert prompt_of(engine).count(IDS["<|end|>"]) == 1 and IDS["<|call|>"] not in prompt_of(engine)


def test_stop_strings_end_words_and_never_headers(engine: FakeEngine, http: httpx.Client) -> None:
    """A header's words are no words of the reply."""
    said = asked(engine, http, tokens_of(THOUGHT + ANSWER), stop=["final", "analysis", "assistant"])
    assert said["content"] == "Four."
    said = asked(engine, http, tokens_of(THOUGHT + ANSWER), stop=["ur"])
    assert (said["content"], said["finish_reason"]) == ("Fo", "stop")


def test_formats_are_of_the_answer_and_efforts_are_the_models(engine: FakeEngine, http: httpx.Client) -> None:
    """A reply that a grammar rules begins with its answer; a call cannot be forced; effort goes to the template."""
    said = asked(engine, http, [*token_ids("{}"), 262], response_format={"type": "json_object"})
    assert (said["content"], "reasoning_content" in said) == ("{}", False)
    assert prompt_of(engine)[-7:] == tokens_of("<|channel|>final<|message|>")

    asked(engine, http, tokens_of(ANSWER), reasoning_effort="low")
    assert prompt_of(engine)[:3] == token_ids("low")
    assert "is one of low, medium, high" in asked(engine, http, [], reasoning_effort="xhigh")["message"]
    assert "cannot be made to" in asked(engine, http, [], tools=[ADD], tool_choice="required")["message"]


def test_every_call_of_a_turn_is_given_back(engine: FakeEngine, http: httpx.Client) -> None:
    """The template tells the first call of a turn alone: several become turns of their own, each with its result."""
    calls = [{"id": str(i), "type": "function", "function": {"name": f"f{i}", "arguments": "{}"}} for i in range(2)]
    turn = {"role": "assistant", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": str(i), "content": f"r{i}"} for i in range(2)]
    asked(engine, http, tokens_of(ANSWER), messages=[turn, *results])

    turns = "".join(f"<|start|>assistant<|message|>f{i}<|end|><|start|>tool<|message|>r{i}<|end|>" for i in range(2))
    assert prompt_of(engine) == tokens_of(f"{turns}<|start|>assistant")


def test_reply_without_a_header_is_its_text(engine: FakeEngine, http: httpx.Client) -> None:
    """A model that was trained away from the format still answers."""
    assert asked(engine, http, [*token_ids("Plain."), 262])["content"] == "Plain."
