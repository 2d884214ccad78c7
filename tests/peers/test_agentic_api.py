# agentic-api, vLLM's stateful server of responses in Rust (`pip install agentic-api==0.9.0` into PEERS/agentic), before
# a gateway: what it stores and sends on again is answered, and its tools' turns come back to its client.

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
from msgspec.structs import replace
from openai import OpenAI

from gateway.run.processes import free_port
from tests.support.house import House, model, running_house, settings_for
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.servers import database_of_its_own
from tests.support.temporary_stores import temporary_valkey
from tests.support.waiting import until

SERVER = Path(os.environ.get("PEERS", ".")).absolute() / "agentic" / "bin" / "agentic-server"
TOOL: Any = {
    "type": "function",
    "name": "open_gate",
    "parameters": {"type": "object", "properties": {"width": {"type": "integer"}}, "required": ["width"]},
    "strict": False,
}

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(
        not SERVER.exists(), reason=f"SKIPPED: no {SERVER}; pip install agentic-api==0.9.0 into PEERS/agentic"
    ),
]


@pytest.fixture(scope="module")
def upstream() -> Iterator[ScriptedUpstream]:
    with ScriptedUpstream(models=("gpt-4o",)) as upstream:
        yield upstream
        assert upstream.violations == []


@pytest.fixture(scope="module")
def house(upstream: ScriptedUpstream, tmp_path_factory: pytest.TempPathFactory, postgres_url: str) -> Iterator[House]:
    with database_of_its_own(postgres_url) as database_url, temporary_valkey() as valkey:
        settings = settings_for(database_url, valkey.url, upstream.url, tmp_path_factory.mktemp("house"))
        with running_house(replace(settings, models={"gpt-4o": model("gpt-4o")}, auto={}, aliases={})) as house:
            yield house


@pytest.fixture(scope="module")
def client(house: House, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """OpenAI's package at agentic-api, which asks the gateway."""
    port, folder = free_port(), tmp_path_factory.mktemp("agentic")
    command = [str(SERVER), "--llm-api-base", house.url, "--gateway-host", "127.0.0.1", "--gateway-port", str(port)]
    env = {"HOME": str(folder), "PATH": os.environ["PATH"], "OPENAI_API_KEY": house.team_key}
    server = subprocess.Popen([*command, "--llm-ready-timeout-s", "20"], cwd=folder, env=env)
    url = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(url + "/health").status_code < 500
        return False

    try:
        until(is_up, within=60)
        with OpenAI(base_url=url + "/v1", api_key=house.team_key, max_retries=0, timeout=60) as client:
            yield client
    finally:
        server.terminate()
        server.wait(15)


def test_answers_and_streams_are_what_the_gateway_says(client: OpenAI) -> None:
    """A word and the same as a stream, with the gateway's counts."""
    plain = client.responses.create(model="gpt-4o", input="Say something.")
    with client.responses.stream(model="gpt-4o", input="Say something.") as stream:
        streamed = stream.get_final_response()

    assert plain.status == streamed.status == "completed"
    assert plain.output_text and plain.output_text == streamed.output_text
    assert plain.usage is not None and plain.usage.output_tokens > 0


def test_a_tool_goes_round_through_what_it_stores(client: OpenAI, upstream: ScriptedUpstream) -> None:
    """Its own conversation goes on: the gateway gets every turn of it."""
    asked = client.responses.create(model="gpt-4o", input='Use open_gate {"width": 3}', tools=[TOOL])
    (call,) = [item for item in asked.output if item.type == "function_call"]
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "It is open."}
    used = client.responses.create(model="gpt-4o", input=[output], previous_response_id=asked.id, tools=[TOOL])

    assert json.loads(call.arguments) == {"width": 3}
    assert used.output_text
    assert [each["role"] for each in (upstream.requests[-1].body or {})["messages"]] == ["user", "assistant", "tool"]


def test_a_refusal_comes_through(client: OpenAI) -> None:
    """It says what is wrong in the gateway's words."""
    with pytest.raises(Exception, match="no-such-model"):
        client.responses.create(model="no-such-model", input="Hi")
