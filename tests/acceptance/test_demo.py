# The promise of the README: one command, and a real request is answered by a real model through every room.

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import BadRequestError, OpenAI

from gateway.run.processes import free_port
from tests.support.waiting import until

TOLLGATE = Path(sys.executable).with_name("tollgate")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """`tollgate dev --json`, ready."""
    folder = tmp_path_factory.mktemp("demo")
    folder.chmod(0o700)
    command = [str(TOLLGATE), "dev", "--json", "--port", str(free_port()), "--data-dir", str(folder / "data")]
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        facts = json.loads(line)
        spent = {"seconds": time.monotonic() - started, "cpu_seconds": cpu_seconds(process.pid)}
        yield facts | spent | {"folder": folder, "pid": process.pid}
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stdout.read() == b""
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def cpu_seconds(pid: int) -> float:
    """Return what a process and all that it started have computed, whatever else runs on the machine."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(sum(process.cpu_times()[:4]) for process in processes)


@pytest.fixture
def client(demo: dict[str, Any]) -> Iterator[OpenAI]:
    """The stock client of the demo's team."""
    with OpenAI(base_url=demo["url"] + "/v1", api_key=demo["team_key"], max_retries=0) as client:
        yield client


def test_the_line_says_everything_another_program_needs(demo: dict[str, Any]) -> None:
    """One line of JSON with the addresses, keys, models and pids."""
    expected = {"url", "team_id", "team_key", "admin_key", "models", "database_url", "redis_url", "engine_url", "pids"}

    assert expected <= demo.keys()
    assert demo["team_id"] == "team_demo"
    assert demo["models"][0] == "tollgate-demo"
    assert demo["pids"].keys() == {"gateway", "worker", "engine", "postgres", "redis"}
    assert all(psutil.pid_exists(pid) for pids in demo["pids"].values() for pid in pids)


def test_the_demo_model_writes_what_a_schema_says(client: OpenAI) -> None:
    """Structure, choices, penalties and salts pass the gateway; a schema that no answer can follow is a 400."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"topic": {"enum": ["quotas", "keys"]}, "urgent": {"type": "boolean"}},
        "required": ["topic", "urgent"],
        "additionalProperties": False,
    }

    def ask(schema: dict[str, Any] | None = None, **more: Any) -> Any:
        shape: Any = {"type": "json_schema", "json_schema": {"name": "ticket", "schema": schema, "strict": True}}
        asked: Any = {"response_format": shape, **more} if schema else more
        messages: Any = [{"role": "user", "content": "My key is refused. " * 8}]
        return client.chat.completions.create(model="tollgate-demo", messages=messages, max_tokens=60, **asked)

    ticket = json.loads(ask(schema, frequency_penalty=0.5, logit_bias={"7": -5}).choices[0].message.content)
    choice = ask(extra_body={"guided_choice": ["yes", "no"], "cache_salt": "a"})
    sglangs = {"regex": "[a-c]-[0-9]{2}", "ebnf": 'root ::= letter "-" [0-9]{2}\nletter ::= "a" | "b" | "c"'}
    matches = [ask(extra_body={name: value, "cache_salt": "b"}) for name, value in sglangs.items()]
    with pytest.raises(BadRequestError, match="nonsense") as caught:
        ask({"type": "nonsense"})

    assert (sorted(ticket), ticket["topic"] in ("quotas", "keys")) == (["topic", "urgent"], True)
    assert choice.choices[0].message.content in ("yes", "no")
    assert all(re.fullmatch(sglangs["regex"], each.choices[0].message.content) for each in matches)
    cached = [each.usage.prompt_tokens_details.cached_tokens for each in (choice, *matches)]
    assert cached[:2] == [0, 0] and cached[2] > 0, "a prompt finds what was cached under its own salt"
    assert caught.value.param == "response_format"


@pytest.mark.parametrize("model", ["tollgate-demo", "auto"])
def test_the_demo_model_answers_in_a_sentence_and_ends(client: OpenAI, model: str) -> None:
    """The answer comes out of the weights: about Tollgate, whole, ended by the model itself."""
    reply = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "What is Tollgate?"}], temperature=0
    )
    choice = reply.choices[0]

    assert choice.finish_reason == "stop"
    assert "Tollgate" in (choice.message.content or "")
    assert (choice.message.content or "").rstrip().endswith(".")
    assert reply.model == model
    assert reply.model_used == "tollgate-demo"  # type: ignore[attr-defined]


def test_a_stream_of_the_demo_model_is_its_plain_answer(client: OpenAI) -> None:
    """At temperature 0 the pieces add up to the plain text, and usage is the same."""
    ask: Any = {"model": "auto", "messages": [{"role": "user", "content": "What is Tollgate?"}], "temperature": 0}
    plain = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content
    assert chunks[-1].usage is not None and plain.usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens


@pytest.mark.parametrize("model", ["tollgate-demo", "auto"])
def test_completions_and_embeddings_of_the_demo_model(client: OpenAI, model: str) -> None:
    """The demo model serves all three kinds of request."""
    completion = client.completions.create(model=model, prompt="Tollgate is", max_tokens=8, temperature=0)
    vectors = client.embeddings.create(model=model, input=["What is Tollgate?", "what is tollgate", "quota"])
    lengths = [sum(value * value for value in item.embedding) for item in vectors.data]

    assert completion.choices[0].text
    assert completion.usage is not None and completion.usage.completion_tokens <= 8
    assert lengths == pytest.approx([1.0, 1.0, 1.0], abs=1e-3)


def test_usage_and_the_usage_command_show_these_calls(demo: dict[str, Any], client: OpenAI) -> None:
    """Tokens and dollars of exactly the calls made are soon there, by HTTP and by command."""
    with httpx.Client(base_url=demo["url"], headers={"authorization": f"Bearer {demo['team_key']}"}) as http:
        before = settled_usage(http)
        reply = client.chat.completions.create(
            model="auto", messages=[{"role": "user", "content": "Who pays?"}], max_tokens=16
        )
        until(lambda: statement(http)["requests"] > before["requests"])
        after = statement(http)
    command = [str(TOLLGATE), "usage", "--team", "team_demo", "--format", "json"]
    config = {"TOLLGATE_CONFIG": str(demo["folder"] / "data" / "tollgate.yaml")}
    told = subprocess.run(command, capture_output=True, check=True, env={**os.environ, **config}, cwd=demo["folder"])

    assert reply.usage is not None
    assert after["input_tokens"] - before["input_tokens"] == reply.usage.prompt_tokens
    assert after["output_tokens"] - before["output_tokens"] == reply.usage.completion_tokens
    cost = Decimal(str(after["cost_usd"])) - Decimal(str(before["cost_usd"]))
    assert cost == Decimal(reply.usage.cost_usd)  # type: ignore[attr-defined]
    by_command = json.loads(told.stdout)
    assert by_command["requests"] == after["requests"]
    assert Decimal(str(by_command["cost_usd"])) == Decimal(str(after["cost_usd"]))


def statement(http: httpx.Client) -> dict[str, Any]:
    return http.get("/v1/usage", params={"team_id": "team_demo"}).raise_for_status().json()


def settled_usage(http: httpx.Client) -> dict[str, Any]:
    """Return the statement once it has stopped growing from earlier tests."""
    time.sleep(1.0)
    return statement(http)


def test_a_prompt_longer_than_the_models_context_is_refused(client: OpenAI, demo: dict[str, Any]) -> None:
    """The engine says so, the gateway passes it on, and the next call is answered."""
    headers = {"authorization": f"Bearer {demo['team_key']}"}
    body = {"model": "tollgate-demo", "messages": [{"role": "user", "content": "toll " * 20_000}]}
    answer = httpx.post(f"{demo['url']}/v1/chat/completions", json=body, headers=headers, timeout=30)
    after = client.completions.create(model="tollgate-demo", prompt="Tollgate is", max_tokens=2)

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert after.choices[0].text


def test_the_whole_demo_fits_in_memory(demo: dict[str, Any]) -> None:
    """Everything together, shared pages counted once, stays below 1.5 GB when idle."""
    processes = [psutil.Process(demo["pid"]), *psutil.Process(demo["pid"]).children(recursive=True)]
    total = sum(process.memory_full_info().pss for process in processes)

    assert total < 1.5e9, f"{total / 1e6:.0f} MB"


def test_the_demo_is_ready_in_time(demo: dict[str, Any]) -> None:
    """Ready within twenty seconds of its start on one core that it has for itself; here it has not."""
    assert 1 < demo["cpu_seconds"] < 20 and demo["seconds"] < 60
