# Two engines as their users start them: one computes prompts, the other goes on with their blocks. Answers are those of
# one engine alone, and stay so when the other stands still, dies or comes back.

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.core.settings import Prefill, ProviderSettings
from router.catalog.targets import Endpoint
from tests.support.engine_server import EngineServer, running_engine_server
from tests.support.house import model, running_house, settings_for
from tests.support.tiny_model import TinyModel, write_tiny_model
from tests.support.waiting import until

SECRET = "the secret of two engines of a test"
FLAGS = ("--kv-transfer-address", "127.0.0.1:0", "--kv-pull-seconds", "3", "--allow-model-loading", "--api-key", SECRET)
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
HEADERS = {"authorization": f"Bearer {SECRET}", "x-tenant": "a team"}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineServer, EngineServer]]:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"), with_tokenizer=True)
    with running_engine_server(folder, *FLAGS) as prefiller, running_engine_server(folder, *FLAGS) as decoder:
        yield prefiller, decoder


def ask(engine: EngineServer, subject: str, **more: Any) -> dict[str, Any]:
    """Ask about something at length; return the whole answer."""
    question = f"What is to be said of {subject}? " * 6
    body = {"model": "tiny", "messages": [{"role": "user", "content": question}], "max_tokens": 12, "seed": 5, **more}
    answer = httpx.post(engine.url + "/v1/chat/completions", json=body, headers=HEADERS, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def prefilled(engine: EngineServer, subject: str) -> dict[str, Any]:
    """Have a prompt computed; return what the engine that goes on is told."""
    told = ask(engine, subject, max_tokens=1, kv_transfer_params=PREFILL)["kv_transfer_params"]
    assert told["remote_port"] > 0
    return told


def counter(engine: EngineServer, name: str) -> float:
    metrics = httpx.get(engine.url + "/metrics", headers=HEADERS).text
    lines = [line for line in metrics.splitlines() if line.startswith(f"tollgate_engine_{name}{{")]
    return float(lines[0].rpartition(" ")[2])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_answer_is_that_of_one_engine(temperature: float, engines: tuple[EngineServer, EngineServer]) -> None:
    """Whole and as a stream; the decoder computes less of the prompt than half."""
    prefiller, decoder = engines
    subject = f"bridges at {temperature}"
    before = counter(decoder, "kv_blocks_pulled_total")

    told = prefilled(prefiller, subject)
    answer = ask(decoder, subject, temperature=temperature, kv_transfer_params=told)

    until(lambda: counter(decoder, "kv_blocks_pulled_total") - before >= answer["usage"]["prompt_tokens"] // 32)
    assert counter(decoder, "kv_blocks_shared_total") == counter(decoder, "kv_blocks_pulled_total")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] < answer["usage"]["prompt_tokens"] // 2
    assert text_of(answer) == text_of(ask(prefiller, subject, temperature=temperature))
    until(lambda: counter(prefiller, "kv_blocks_held") == 0)


def test_a_gateway_has_long_prompts_computed_elsewhere(
    engines: tuple[EngineServer, EngineServer], database_url: str, redis_url: str, tmp_path: Path
) -> None:
    """Its answer is that of one engine, and the prompt's tokens are paid for once."""
    prefiller, decoder = engines
    prompts, own = (
        ProviderSettings(
            name=name,
            format="openai",
            self_hosted=True,
            api_keys=(SECRET,),
            endpoints=(Endpoint("here", engine.url + "/v1"),),
            prefill=prefill,
        )
        for name, engine, prefill in (
            ("prompts", prefiller, None),
            ("own", decoder, Prefill(provider="prompts", tokens=50)),
        )
    )
    more = {"providers": {"own": own, "prompts": prompts}, "models": {"tiny": model("tiny", "own")}}
    settings = settings_for(database_url, redis_url, "", tmp_path / "data", **more, auto={}, aliases={})
    before = counter(decoder, "kv_blocks_pulled_total")
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Which way to the weir? " * 10}],
        "max_tokens": 12,
    }
    with running_house(settings) as house, house.client() as client:
        answer = client.post("/v1/chat/completions", json={**body, "temperature": 0}).raise_for_status().json()

    until(lambda: counter(decoder, "kv_blocks_pulled_total") - before >= answer["usage"]["prompt_tokens"] // 32)
    alone = httpx.post(prefiller.url + "/v1/chat/completions", json={**body, "temperature": 0}, headers=HEADERS).json()
    assert text_of(answer) == text_of(alone)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_prefiller_that_stands_still_is_waited_for_no_longer_than_was_said(
    engines: tuple[EngineServer, EngineServer],
) -> None:
    """The decoder computes the prompt then, and answers others meanwhile."""
    with asked_of_a_stopped_prefiller(engines, "ferries") as waiting:
        ask(engines[1], "tunnels")
        waiting.result(60)


def test_a_decoder_that_dies_with_blocks_on_their_way_goes_on(engines: tuple[EngineServer, EngineServer]) -> None:
    """Its next process asks for them again, or computes them; the prefiller's lease ends by itself at the latest."""
    decoder = engines[1]
    with asked_of_a_stopped_prefiller(engines, "piers") as waiting:
        until(lambda: counter(decoder, "kv_pulls_waiting") == 1)
        decoder.engine().kill()
        waiting.result(60)


@contextmanager
def asked_of_a_stopped_prefiller(
    engines: tuple[EngineServer, EngineServer], subject: str
) -> Iterator[Future[dict[str, Any]]]:
    """Ask the decoder about something while the engine that has the blocks stands still: the answer, which must have
    come by the end of the block, is that of one engine."""
    prefiller, decoder = engines
    expected = ask(prefiller, subject)
    told = prefilled(prefiller, subject)
    os.kill(prefiller.engine().pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ask, decoder, subject, kv_transfer_params=told)
            yield waiting
    finally:
        os.kill(prefiller.engine().pid, signal.SIGCONT)

    assert text_of(waiting.result()) == text_of(expected)


def test_a_prefiller_that_dies_leaves_prompts_to_the_decoder(engines: tuple[EngineServer, EngineServer]) -> None:
    """The process that follows it knows nothing of its leases."""
    prefiller, decoder = engines
    expected = ask(prefiller, "fords")
    told = prefilled(prefiller, "fords")
    prefiller.engine().kill()

    assert text_of(ask(decoder, "fords", kv_transfer_params=told)) == text_of(expected)


def test_an_engine_that_sleeps_takes_another_model(engines: tuple[EngineServer, EngineServer], tmp_path: Path) -> None:
    """By the process that it has: it is asked by the new name, answers as that model, and exchanges blocks once the
    first one is back."""
    prefiller, decoder = engines
    larger = write_tiny_model(tmp_path / "larger", TinyModel(hidden_size=96, num_layers=3), with_tokenizer=True)
    words = list(map(str, decoder.process.args))  # type: ignore[arg-type]
    first = Path(words[words.index("--model") + 1])

    def load(folder: Path, name: str) -> httpx.Response:
        asked = {"model": str(folder), "served_model_name": name}
        return httpx.post(decoder.url + "/load_model", json=asked, headers=HEADERS, timeout=60)

    before, process = text_of(ask(decoder, "models")), decoder.engine().pid
    awake = load(larger, "larger")
    httpx.post(decoder.url + "/sleep", headers=HEADERS, timeout=60)
    missing = load(tmp_path, "nothing")
    loaded = load(larger, "larger")
    by_old_name = httpx.post(
        decoder.url + "/v1/completions", json={"model": "tiny", "prompt": "a"}, headers=HEADERS, timeout=60
    )
    other = text_of(ask(decoder, "models", model="larger"))
    httpx.post(decoder.url + "/sleep", headers=HEADERS, timeout=60)
    load(first, "tiny")
    prefiller.wait_until_ready()
    told = prefilled(prefiller, "what is loaded again")
    pulled = counter(decoder, "kv_blocks_pulled_total")
    ask(decoder, "what is loaded again", kv_transfer_params=told)

    assert (awake.status_code, missing.status_code, loaded.status_code) == (503, 400, 200)
    assert loaded.json()["status"] == "active" and by_old_name.status_code == 404
    assert other != before == text_of(ask(decoder, "models"))
    assert counter(decoder, "kv_blocks_pulled_total") > pulled
    assert decoder.engine().pid == process
