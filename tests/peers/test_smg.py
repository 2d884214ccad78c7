# SMG, a router in Rust, in front of three replicas of our engine as it comes (`pip install smg` into PEERS/smg). It
# knows nothing of Tollgate; what it asks of an engine are the field's contracts.

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from gateway.run.processes import free_port
from tests.support.engine_server import EngineServer, running_engine_server
from tests.support.tiny_model import CHAT_TEMPLATE, TinyModel, write_tiny_model
from tests.support.waiting import until

SMG = Path(os.environ.get("PEERS", ".")) / "smg" / "bin" / "smg"
TOOLS_TEMPLATE = "{% for tool in tools or [] %}{{ tool.function.name }}<tool_call>{% endfor %}" + CHAT_TEMPLATE
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "open_gate",
        "parameters": {
            "type": "object",
            "properties": {"width": {"type": "integer", "minimum": 0, "maximum": 999}},
            "required": ["width"],
            "additionalProperties": False,
        },
    },
}

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not SMG.exists(), reason=f"SKIPPED: no {SMG}; pip install smg==1.13.0 into PEERS/smg"),
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineServer]]:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, TinyModel(max_position=1024), with_tokenizer=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = TOOLS_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(running_engine_server(folder)) for _ in range(3)]


@pytest.fixture(scope="module")
def client(engines: list[EngineServer]) -> Iterator[OpenAI]:
    port = free_port()
    command = [str(SMG), "launch", "--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--policy", "round_robin", "--worker-urls", *(engine.url for engine in engines)]
    router = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"

    def has_all() -> bool:
        with contextlib.suppress(httpx.TransportError, ValueError, KeyError):
            return httpx.get(url + "/workers").json()["stats"]["regular_count"] == len(engines)
        return False

    try:
        until(has_all, within=60)
        with OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
            yield client
    finally:
        router.terminate()
        router.wait(15)


def ask(client: OpenAI, **more: object) -> object:
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Open it."}],
        "max_tokens": 200,
        "seed": 5,
        **more,
    }
    return client.chat.completions.create(**asked)


def test_it_serves_all_replicas(client: OpenAI, engines: list[EngineServer]) -> None:
    """Each gets its turn, and answers as it does alone."""
    answers = {ask(client, temperature=0).choices[0].message.content for _ in range(6)}
    alone = OpenAI(base_url=engines[0].url + "/v1", api_key="none")

    assert answers == {ask(alone, temperature=0).choices[0].message.content}
    for engine in engines:
        assert "vllm:request_success_total" in httpx.get(engine.url + "/metrics").text
        assert engine.load()["request_seconds"] > 0


def test_streams_pass_unchanged(client: OpenAI) -> None:
    """Word by word, to the usage."""
    whole = ask(client, temperature=0)
    chunks = list(ask(client, temperature=0, stream=True, stream_options={"include_usage": True}))

    text = "".join(part.delta.content or "" for chunk in chunks for part in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_tools_pass_unchanged(client: OpenAI) -> None:
    """A call that must be made follows its schema."""
    (call,) = ask(client, tools=[TOOL], tool_choice="required").choices[0].message.tool_calls
    pieces = ask(client, tools=[TOOL], tool_choice="required", stream=True)
    deltas = [call for chunk in pieces for part in chunk.choices for call in part.delta.tool_calls or []]

    assert (call.function.name, list(json.loads(call.function.arguments))) == ("open_gate", ["width"])
    assert "".join(delta.function.arguments or "" for delta in deltas) == call.function.arguments
