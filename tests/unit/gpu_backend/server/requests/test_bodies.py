# What clients may ask, and how refusals name the field at fault.

from __future__ import annotations

import json
from typing import Any

import pytest

from gpu_backend.server.checkpoint.checkpoint import SamplingDefaults
from gpu_backend.server.requests.bodies import NO_EXTENSIONS, Extensions, Sender, read_body, read_sender, sampling_of
from gpu_backend.server.requests.checks import check_bias, check_chat, check_completion
from protocol.chat import ChatRequest
from protocol.completions import CompletionRequest
from protocol.embeddings import EmbeddingRequest
from protocol.errors import BadRequest

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> tuple[ChatRequest, Extensions]:
    body, extensions = read_body(json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode(), ChatRequest)
    check_chat(body, extensions)
    check_bias(body.logit_bias, vocab_size=260)
    return body, extensions


def completion(**fields: Any) -> tuple[CompletionRequest, Extensions]:
    body, extensions = read_body(json.dumps({"model": "m", "prompt": "hi", **fields}).encode(), CompletionRequest)
    check_completion(body, extensions)
    return body, extensions


def sampling(body: ChatRequest, extensions: Extensions, defaults: SamplingDefaults | None = None) -> Any:
    eos = frozenset({7})
    return sampling_of(body, extensions, 10, None, eos, defaults or SamplingDefaults(), draw_seed=lambda: 42)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_value"),
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"temperature": -0.1}, "temperature", "invalid_value"),
        ({"top_p": 1.5}, "top_p", "invalid_value"),
        ({"min_p": -1}, "min_p", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 129}, "n", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": -5}, "max_completion_tokens", "invalid_value"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "invalid_value"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
        ({"frequency_penalty": -2.1}, "frequency_penalty", "invalid_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"repetition_penalty": 11}, "repetition_penalty", "invalid_value"),
        ({"min_tokens": -1}, "min_tokens", "invalid_value"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "invalid_value"),
        ({"logit_bias": {"300": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"05": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"²": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"5": 100.5}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"5": "1"}}, "logit_bias[...]", "invalid_type"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stop": ["a", ""]}, "stop", "invalid_value"),
        ({"stop": ["a"] * 17}, "stop", "invalid_value"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
        ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
        ({"messages": [{"role": "assistant", "audio": {"id": "audio_1"}}]}, "messages", "unsupported_parameter"),
        ({"resume_token_ids": [1], "n": 2}, "n", "invalid_value"),
        ({"resume_text_chars": 1}, "resume_text_chars", "invalid_value"),
        ({"no_such_field": 1}, "no_such_field", "unsupported_parameter"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids[0]", "invalid_type"),
    ],
)
def test_a_bad_chat_request_names_its_field(fields: dict[str, Any], param: str, code: str) -> None:
    """Each refusal is a 400 whose param is the field to change."""
    with pytest.raises(BadRequest) as caught:
        chat(**fields)

    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"suffix": "end"}, "suffix", "unsupported_parameter"),
        ({"best_of": 2}, "best_of", "unsupported_parameter"),
        ({"logprobs": 6}, "logprobs", "invalid_value"),
        ({"echo": True, "resume_token_ids": [1]}, "echo", "unsupported_parameter"),
        ({"max_tokens": -1}, "max_tokens", "invalid_value"),
        ({"prompt": [1, "a"]}, None, "invalid_value"),
    ],
)
def test_a_bad_completion_names_its_field(fields: dict[str, Any], param: str | None, code: str) -> None:
    """Completions have rules of their own."""
    with pytest.raises(BadRequest) as caught:
        completion(**fields)

    assert (caught.value.param, caught.value.code) == (param, code)


def test_what_changes_nothing_is_accepted() -> None:
    """Fields that ask for what happens anyway, and those that only speak of the caller, are no reason to refuse."""
    chat(
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        top_logprobs=0,
        logit_bias={},
        presence_penalty=0,
        max_tokens=5,
        max_completion_tokens=5,
        user="u",
        metadata={"a": "b"},
        top_k=None,
        stop_token_ids=None,
        stream=True,
        stream_options={"include_usage": True},
    )
    completion(best_of=2, n=2, max_tokens=0, echo=True)


def test_our_own_fields_are_no_part_of_embeddings() -> None:
    """An embedding samples nothing."""
    with pytest.raises(BadRequest) as caught:
        read_body(b'{"model": "m", "input": "x", "top_k": 1}', EmbeddingRequest)

    assert caught.value.param == "top_k"


def test_sampling_takes_the_request_before_the_model_before_ours() -> None:
    """A field of the request wins over generation_config.json, which wins over OpenAI's defaults."""
    defaults = SamplingDefaults(temperature=0.6, top_k=20)
    said = sampling(*chat(temperature=0, top_p=0.5, seed=5), defaults)
    unsaid = sampling(*chat(), defaults)

    assert (said.temperature, said.top_p, said.top_k, said.seed) == (0, 0.5, 20, 5)
    assert (unsaid.temperature, unsaid.top_p, unsaid.top_k, unsaid.min_p, unsaid.seed) == (0.6, 1.0, 20, 0.0, 42)


def test_extremes_keep_their_meaning() -> None:
    """top_p 0 keeps the likeliest token; top_k -1 is vLLM's word for no limit."""
    extreme = sampling(*chat(top_p=0, top_k=-1))

    assert 0 < extreme.top_p < 1e-3
    assert extreme.top_k == 0


def test_penalties_reach_the_engine() -> None:
    """OpenAI's and vLLM's names; a checkpoint's own repetition penalty holds where the request is silent."""
    asked = sampling(
        *chat(presence_penalty=1, frequency_penalty=-0.5, repetition_penalty=1.2, logit_bias={"5": -100}, min_tokens=4)
    )
    unsaid = sampling(*chat(min_tokens=99), SamplingDefaults(repetition_penalty=1.05))

    assert (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty) == (1, -0.5, 1.2)
    assert (asked.logit_bias, asked.min_tokens) == (((5, -100.0),), 4)
    assert (unsaid.repetition_penalty, unsaid.min_tokens) == (1.05, 10)  # no more than the context leaves


def test_end_tokens_stop_unless_they_are_to_be_ignored() -> None:
    """The caller's stop tokens come on top of the model's own."""
    assert sampling(*chat(stop_token_ids=[3])).stop_token_ids == {3, 7}
    assert sampling(*chat(stop_token_ids=[3], ignore_eos=True)).stop_token_ids == {3}


def test_the_sender_is_read_from_headers() -> None:
    """Without headers a request is an interactive one of the tenant without a name."""
    headers = {"x-tenant": "team_a", "x-weight": "2.5", "x-tier": "batch", "x-deadline-ms": "1500"}

    assert read_sender(headers) == Sender("team_a", 2.5, "batch", "normal", 1500)
    assert read_sender({}) == Sender("", 1.0, "interactive", "normal", None)
    assert read_sender({"x-fails-over": "1"}).fails_over
    assert read_sender({"x-gateway-inference-fairness-id": "flow"}).tenant == "flow"  # of a router that knows no other
    assert read_sender({"x-gateway-inference-fairness-id": "flow", "x-tenant": "team_a"}).tenant == "team_a"
    assert [read_sender({"x-priority": said}).priority for said in ("low", "high")] == ["low", "high"]
    assert read_sender({"x-weight": "1e-320"}).weight == 0.001  # service is divided by it


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-tier", "urgent"),
        ("x-priority", "urgent"),
        ("x-weight", "0"),
        ("x-weight", "nan"),
        ("x-weight", "inf"),
        ("x-weight", "1e308"),
        ("x-deadline-ms", "soon"),
        ("x-deadline-ms", "9" * 400),
        ("x-deadline-ms", "9" * 5000),
        ("x-fails-over", "yes"),
    ],
)
def test_bad_headers_are_named(name: str, value: str) -> None:
    """A header that makes no sense is refused like a field."""
    with pytest.raises(BadRequest) as caught:
        read_sender({name: value})

    assert caught.value.param == name


def test_no_extensions_are_the_defaults() -> None:
    """A body without our fields is read without a second look."""
    assert chat()[1] is NO_EXTENSIONS
