# Dynamo's selection service, fed with the KV events of two replicas of our engine as they come (`pip install
# ai-dynamo-runtime` into PEERS/dynamo): it knows nothing of Tollgate, and sends a prompt to where it is cached.

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from gateway.run.processes import free_port
from tests.support.engine_server import EngineServer, running_engine_server
from tests.support.tiny_model import TinyModel, write_tiny_model
from tests.support.waiting import until

PYTHON = Path(os.environ.get("PEERS", ".")) / "dynamo" / "bin" / "python"
BLOCK = 16

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(
        not PYTHON.exists(), reason=f"SKIPPED: no {PYTHON}; pip install ai-dynamo-runtime==1.6.1 into PEERS/dynamo"
    ),
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, tuple[EngineServer, dict[str, Any]]]]:
    """Give two replicas by the numbers that the service knows them by, and where each tells its events."""
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), TinyModel(), with_tokenizer=True)
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
