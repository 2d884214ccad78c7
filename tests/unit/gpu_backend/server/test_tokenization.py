# Texts as tokens over HTTP: what routers and clients ask that know vLLM's engine.

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gpu_backend.step.messages import LoadReport
from tests.support.fake_engine import FakeEngine
from tests.support.front import CHAT, END, token_ids


def test_a_text_and_its_tokens(http: httpx.Client) -> None:
    """There and back; a text may be longer than the context, which holds 64."""
    there = http.post("/tokenize", json={"model": "tiny", "prompt": "hé!", "return_token_strs": True}).json()
    back = http.post("/detokenize", json={"model": "tiny", "tokens": there["tokens"]}).json()
    long = http.post("/tokenize", json={"prompt": "x" * 500}).json()

    assert there == {
        "count": 4,
        "max_model_len": 64,
        "tokens": token_ids("hé!"),
        "token_strs": ["h", "\ufffd", "\ufffd", "!"],
    }
    assert back == {"prompt": "hé!"}
    assert (long["count"], long["token_strs"]) == (500, None)
    assert http.post("/detokenize", json={"tokens": [END]}).json() == {"prompt": "<|end|>"}


def test_a_conversation_is_rendered_as_it_is_computed(http: httpx.Client, engine: FakeEngine) -> None:
    """All three ways tell the tokens that the engine gets for it."""
    tokenized = http.post("/tokenize", json={"messages": CHAT["messages"]}).json()
    rendered = http.post("/v1/chat/completions/render", json=CHAT, headers={"x-request-id": "r1"}).json()
    http.post("/v1/chat/completions", json=CHAT)

    assert rendered == {"request_id": "r1", "model": "tiny", "token_ids": token_ids("<user>hi<assistant>")}
    assert tokenized["tokens"] == rendered["token_ids"] == list(engine.process.commands[-1].prompt_token_ids)


def test_each_prompt_of_a_completion_is_rendered(http: httpx.Client) -> None:
    """As texts or as token ids."""

    def rendered(prompt: Any) -> list[list[int]]:
        body = {"model": "tiny", "prompt": prompt}
        return [entry["token_ids"] for entry in http.post("/v1/completions/render", json=body).json()]

    assert rendered(["a", "bc"]) == [token_ids("a"), token_ids("bc")]
    assert rendered([5, 6]) == [[5, 6]]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "truncate": 5}, "truncate"),
        ("/tokenize", {"messages": CHAT["messages"], "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"messages": CHAT["messages"], "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {"tokens": [5000]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/v1/chat/completions/render", {**CHAT, "messages": []}, "messages"),
        ("/v1/completions/render", {"model": "tiny", "prompt": "x" * 65}, "prompt"),
    ],
)
def test_what_is_wrong_is_named(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    """As a 400 in OpenAI's shape."""
    refused = http.post(path, json=body)

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_another_model_is_not_here(http: httpx.Client) -> None:
    """Whatever is asked of it."""
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert http.post(path, json={"model": "other", **body}).json()["error"]["code"] == "model_not_found"


def test_an_answer_tells_the_load_where_it_is_asked(http: httpx.Client, engine: FakeEngine) -> None:
    """In Envoy's header, as text and as JSON; streams too. Another format, or none, is not answered."""
    engine.process.say(LoadReport(3, 2, 3, 8, 0.5, 6.0, 7.0, 0.25))
    while http.get("/load").json()["queue_depth"] != 3:
        pass

    def told(format: str | None, stream: bool = False) -> str | None:
        headers = {} if format is None else {"endpoint-load-metrics-format": format}
        answer = http.post("/v1/chat/completions", json={**CHAT, "stream": stream}, headers=headers)
        return answer.headers.get("endpoint-load-metrics")

    metrics = "named_metrics.kv_cache_usage_perc=0.5, named_metrics.num_requests_waiting=3.0"
    as_json = '{"named_metrics":{"kv_cache_usage_perc":0.5,"num_requests_waiting":3.0,"num_requests_running":2.0}}'
    assert told("TEXT") == told("text", stream=True) == f"TEXT {metrics}, named_metrics.num_requests_running=2.0"
    assert told("json") == f"JSON {as_json}"
    assert told("bin") is told(None) is None


def test_routers_find_what_they_probe(http: httpx.Client) -> None:
    """The release, the cache's size, that there are no adapters, and that the model adapts no other."""
    metrics = http.get("/metrics").text

    assert list(http.get("/version").json()) == ["version"]
    assert 'vllm:cache_config_info{block_size="16",model_name="tiny",num_gpu_blocks="8"} 1.0' in metrics
    assert (
        'vllm:lora_requests_info{max_lora="0",model_name="tiny",running_lora_adapters="",waiting_lora_adapters=""}'
        in (metrics)
    )
    assert http.get("/v1/models").json()["data"][0]["parent"] is None
