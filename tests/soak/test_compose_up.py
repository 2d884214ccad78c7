# compose.yaml in real containers: from nothing to a first answer, a gateway replaced under load, and true books.
# It takes ports 80, 443 and 9090, and half an hour if the images have to be loaded.

from __future__ import annotations

import itertools
import os
import re
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
PROJECT = "tollgate-soak"
URL = "https://localhost"
SECRETS = (
    "POSTGRES_PASSWORD",
    "POSTGRES_SERVICE_PASSWORD",
    "REDIS_PASSWORD",
    "TOLLGATE_ADMIN_KEY",
    "TOLLGATE_METRICS_KEY",
    "TOLLGATE_KEY_PEPPER",
    "ENGINE_SECRET",
)
QUESTION = {"model": "auto", "max_tokens": 8, "messages": [{"role": "user", "content": "What is Tollgate?"}]}
CLIENTS = 4
TURN = 5  # calls of each client, beside those that are asked while the gateway is replaced


def has_docker() -> bool:
    """Whether an engine answers, and Compose speaks to it."""
    if shutil.which("docker") is None:
        return False
    asked = (["docker", "info"], ["docker", "compose", "version"])
    return all(subprocess.run(words, capture_output=True).returncode == 0 for words in asked)


pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not has_docker(), reason="SKIPPED: no Docker engine answers here"),
]


class House:
    """What runs under Compose, with secrets of its own."""

    def __init__(self) -> None:
        self.env = {**os.environ, "SITE": "localhost", **{name: secrets.token_hex(32) for name in SECRETS}}

    def compose(self, *words: str) -> str:
        """Run `docker compose`; return what it prints."""
        command = ["docker", "compose", "--project-name", PROJECT, "--profile", "cpu", *words]
        done = subprocess.run(command, cwd=ROOT, env=self.env, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    def tollgate(self, *words: str) -> str:
        """Run a command of ours in the gateway's container."""
        return self.compose("exec", "-T", "gateway", "tollgate", *words)


@pytest.fixture
def house() -> Iterator[House]:
    """Started as the file says, and taken away with its volumes."""
    house = House()
    try:
        house.compose("up", "--detach", "--build")
        wait_until(is_ready)
        yield house
    finally:
        house.compose("down", "--volumes", "--timeout", "30")


def test_it_answers_and_loses_no_call_when_its_gateway_is_replaced(house: House) -> None:
    """Every call is answered, streams whole, while the gateway is made anew; then one row for each, and all is seen."""
    house.tollgate("teams", "create", "search", "--usd-per-month", "500")
    key = re.search(r"tg-\S+", house.tollgate("keys", "create", "--team", "search"))
    assert key is not None
    headers = {"authorization": f"Bearer {key[0]}"}
    answers: list[str] = []
    is_over = threading.Event()

    def be_client() -> None:
        with httpx.Client(base_url=URL, verify=False, headers=headers, timeout=120) as client:
            for number in itertools.count():
                if is_over.is_set() and number >= TURN:
                    break
                answer = client.post("/v1/chat/completions", json=QUESTION | {"stream": number % 2 == 1})
                is_whole = answer.text.endswith("data: [DONE]\n\n") if number % 2 else answer.is_success
                answers.append("" if is_whole else f"{answer.status_code}: {answer.text[-300:]}")

    clients = [threading.Thread(target=be_client) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    wait_until(lambda: len(answers) >= CLIENTS)
    house.compose("up", "--detach", "--force-recreate", "--no-deps", "gateway")
    wait_until(is_ready)
    is_over.set()
    for client in clients:
        client.join()
    wait_until(lambda: count_rows(headers) >= len(answers))
    wait_until(lambda: set(targets().values()) == {"up"}, within=60)

    assert set(answers) == {""}
    assert count_rows(headers) == len(answers)
    assert "agree" in house.tollgate("audit")
    assert set(targets()) == {"gateway", "worker", "engine"}
    assert httpx.get(f"{URL}/metrics", verify=False).status_code == 404


def is_ready() -> bool:
    try:
        return httpx.get(f"{URL}/health/ready", verify=False, timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


def count_rows(headers: dict[str, str]) -> int:
    usage = httpx.get(f"{URL}/v1/usage?team_id=search", verify=False, headers=headers, timeout=60)
    requests: int = usage.raise_for_status().json()["requests"]
    return requests


def targets() -> dict[str, str]:
    """What Prometheus reads, and whether it can: job and health."""
    seen = httpx.get("http://127.0.0.1:9090/api/v1/targets", timeout=10).raise_for_status().json()
    return {target["labels"]["job"]: target["health"] for target in seen["data"]["activeTargets"]}


def wait_until(holds: Callable[[], bool], within: float = 300) -> None:
    deadline = time.monotonic() + within
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.5)
