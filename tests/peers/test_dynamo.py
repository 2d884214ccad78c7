# Dynamo's selection service, fed with the KV events of two replicas of our engine as they come (`pip install
# ai-dynamo-runtime` into PEERS/dynamo): it knows nothing of Tollgate, and sends a prompt to where it is cached.

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from gateway.fleet.kv_events import KvEvents
from gateway.run.processes import free_port
from protocol.serving.announcements import KvEventsAt
from protocol.serving.prompt_marks import FIRST, PROMPT_MARKS, MarkedPrompt, marks_of
from router.cached_prompts import CachedPrompts
from router.catalog.targets import Endpoint, Target
from router.replicas import Standing, by_work
from tests.support.engine_server import EngineServer, running_engine_server
from tests.support.house import model
from tests.support.tiny_model import TinyModel, write_tiny_model
from tests.support.waiting import until, until_found

PYTHON = Path(os.environ.get("PEERS", ".")) / "dynamo" / "bin" / "python"
BLOCK = 16
OTHER = 3000  # tokens of a prompt that one replica has to compute already; the tiny model's are bytes

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(
        not PYTHON.exists(), reason=f"SKIPPED: no {PYTHON}; pip install ai-dynamo-runtime==1.6.1 into PEERS/dynamo"
    ),
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, tuple[EngineServer, dict[str, Any]]]]:
    """Give two replicas by the numbers that the service knows them by, and where each tells its events."""
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), TinyModel(max_position=4096), with_tokenizer=True)
    with contextlib.ExitStack() as stack:
        found = {}
        for number in (1, 2):
            told = {
                "enable_kv_cache_events": True,
                "endpoint": f"tcp://127.0.0.1:{free_port()}",
                "replay_endpoint": f"tcp://127.0.0.1:{free_port()}",
            }
            flags = ("--kv-events-config", msgspec.json.encode(told).decode())
            found[number] = stack.enter_context(running_engine_server(folder, *flags)), told
        yield found


@pytest.fixture(scope="module")
def service(engines: dict[int, tuple[EngineServer, dict[str, Any]]]) -> Iterator[httpx.Client]:
    port = free_port()
    command = [str(PYTHON), "-m", "dynamo.select_service", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:

            def answers() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return client.get("/ready").status_code in (200, 503)
                return False

            until(answers, within=60)
            for number, (engine, told) in engines.items():
                worker = {
                    "worker_id": number,
                    "model_name": "tiny",
                    "endpoint": engine.url,
                    "block_size": BLOCK,
                    "data_parallel_start_rank": 0,
                    "data_parallel_size": 1,
                    "kv_events_endpoints": {"0": told["endpoint"]},
                    "replay_endpoint": told["replay_endpoint"],
                }
                client.post("/workers", json=worker).raise_for_status()
            yield client
    finally:
        process.terminate()
        process.wait(15)


@pytest.mark.parametrize("number", [1, 2])
def test_a_prompt_goes_to_the_replica_that_has_it(
    service: httpx.Client, engines: dict[int, tuple[EngineServer, dict[str, Any]]], number: int
) -> None:
    """Every full block of it is found there and nowhere else, within a second; the rest is what is left to compute."""
    engine, _ = engines[number]
    prompt = f"Number {number} asks which toll gate is the longest of them all, and who keeps it at night. " * 2
    tokens = httpx.post(engine.url + "/tokenize", json={"model": "tiny", "prompt": prompt}).json()["tokens"]
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    httpx.post(engine.url + "/v1/completions", json=asked, timeout=30).raise_for_status()

    def cached() -> dict[int, int]:
        scores = service.post("/overlap_scores", json={"model_name": "tiny", "token_ids": tokens}).json()
        return {each["worker_id"]: each["device_blocks"] for each in scores["workers"]}

    until(lambda: cached()[number] > 0, within=1)
    chosen = service.post(
        "/select_and_reserve", json={"model_name": "tiny", "token_ids": tokens, "selection_id": prompt}
    ).json()

    assert cached() == {number: len(tokens) // BLOCK, 3 - number: 0}
    assert (chosen["worker_id"], chosen["endpoint"]) == (number, engine.url)
    assert chosen["effective_prefill_tokens"] == len(tokens) % BLOCK


LONG = "".join(
    f"Gate {number} of the long road is kept by its own keeper, who sleeps at noon. " for number in range(40)
)


async def test_ours_picks_what_dynamo_picks(
    service: httpx.Client, engines: dict[int, tuple[EngineServer, dict[str, Any]]]
) -> None:
    """Of replicas that have more or less of a prompt, and more or less to compute already: by the same events the
    gateway's index and cost choose as the service does."""
    events = KvEvents()
    replicas = {number: Target(model("tiny"), Endpoint("here", engine.url)) for number, (engine, _) in engines.items()}
    for number, (engine, told) in engines.items():
        events.note(engine.url, str(number), KvEventsAt(told["endpoint"], told["replay_endpoint"]))
    prompts = [f"Road {number}. {LONG}" for number in range(6)]
    shares = [(1, 2400, 900), (2, 2400, 900), (1, 1500, 1400), (2, 2000, 0), (1, 2900, 2000), (2, 1600, 600)]
    try:
        compute(engines[1][0], prompts[0][:2000], is_marked=False)  # the marks of its blocks come later than they
        for prompt, (most, longer, shorter) in zip(prompts, shares, strict=True):
            for number, length in ((most, longer), (3 - most, shorter)):
                if length:
                    compute(engines[number][0], prompt[:length])
        for prompt, (most, longer, _) in zip(prompts, shares, strict=True):
            marks = marks_of(prompt.encode(), "")
            asked = {"model": "tiny", "prompt": prompt}
            tokens = httpx.post(engines[1][0].url + "/tokenize", json=asked).json()["tokens"]
            cached = events.cached[engines[most][0].url]
            await until_found(partial(found_in, cached, marks, longer))
            for busy in (0, most):
                standings = [
                    Standing(events.cached[replica.endpoint.base_url].find(marks), OTHER * (number == busy), 0)
                    for number, replica in replicas.items()
                ]
                ours = by_work(list(replicas.values()), standings, len(prompt))[0].endpoint.base_url
                assert ours == picked(service, tokens, busy), (prompt[:8], busy)
    finally:
        events.close()


def compute(engine: EngineServer, prompt: str, *, is_marked: bool = True) -> None:
    """Have a replica compute a prompt, as the gateway asks it to."""
    raw = prompt.encode()
    headers = {PROMPT_MARKS: MarkedPrompt(len(raw), marks_of(raw, "")).header()} if is_marked else {}
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    httpx.post(engine.url + "/v1/completions", json=asked, headers=headers, timeout=30).raise_for_status()


async def found_in(cached: CachedPrompts, marks: tuple[int, ...], length: int) -> bool:
    """Whether the index has all that a replica has of a prompt, to a mark."""
    return cached.find(marks).length > length - 2 * FIRST


def picked(service: httpx.Client, tokens: list[int], busy: int) -> str:
    """Return the service's choice, while the replica ``busy`` has another prompt to compute, if there is such."""
    prompt: dict[str, Any] = {"model_name": "tiny", "token_ids": tokens}
    other = {"model_name": "tiny", "selection_id": "other", "worker_id": busy, "dp_rank": 0, "token_ids": [7] * OTHER}
    if busy:
        service.post("/reservations", json=other | {"effective_prefill_tokens": OTHER}).raise_for_status()
    try:
        return str(service.post("/select", json=prompt).raise_for_status().json()["endpoint"])
    finally:
        if busy:
            service.delete("/reservations/other").raise_for_status()
