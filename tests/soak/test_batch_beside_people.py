# Three hundred lines on the demo engine, through the whole house, while people ask it too: how many steps of the engine
# they wait for a first token, with the batch and without. Steps, not seconds: a slow machine has as many. The
# table lands in benchmarks/results/.

from __future__ import annotations

import os
import platform
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.dev_house import DevHouse

LINES = 300
PEOPLE = 2  # who ask, one call after the other
CALLS = 60  # at least, in each half
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
BUCKET = re.compile(r'^tollgate_engine_first_token_steps_bucket\{le="([^"]+)",[^}]*tier="(\w+)"\} (\S+)$', re.MULTILINE)
QUESTIONS = ("What is a toll gate?", "Who pays for a batch?", "Say something about a queue, please, in a few words.")

pytestmark = pytest.mark.soak


@pytest.mark.timeout(900)
def test_people_wait_as_many_steps_beside_a_batch_as_without(tmp_path: Path) -> None:
    """Within two steps at the ninth decile; and all lines are answered."""
    house = DevHouse(tmp_path / "data")
    try:
        facts = house.start()
        with httpx.Client(base_url=facts["url"], headers=house.team, timeout=120) as client:
            with httpx.Client(base_url=facts["engine_url"], headers=house.engine) as engine:
                measured = measure(client, engine)
        assert house.end(signal.SIGTERM) == 0
    finally:
        house.clean_up()
    write_table(measured)

    assert measured["batch"]["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
    assert quantile(measured["with"], 0.9) <= quantile(measured["without"], 0.9) + 2


def measure(client: httpx.Client, engine: httpx.Client) -> dict[str, Any]:
    """Have people ask without a batch, and with one; return the steps that they and the batch waited."""
    ask(client, 0)  # whatever is loaded on first use is loaded now
    before = steps_of(engine, "interactive")
    people(client, lambda asked: asked < CALLS)
    between = steps_of(engine, "interactive")
    requests = [{"custom_id": f"line-{n}", "body": body(n, max_tokens=32)} for n in range(LINES)]
    started = time.monotonic()
    batch_id = client.post("/v1/batch", json={"requests": requests}).raise_for_status().json()["batch_id"]
    batch: dict[str, Any] = {}

    def goes_on(asked: int) -> bool:
        batch.update(client.get(f"/v1/batch/{batch_id}").raise_for_status().json())
        return batch["ended_at"] is None

    asked = people(client, goes_on)
    return {
        "batch": batch,
        "asked": asked,
        "seconds": time.monotonic() - started,
        "without": between - before,
        "with": steps_of(engine, "interactive") - between,
        "lines": steps_of(engine, "batch"),
    }


def people(client: httpx.Client, goes_on: Callable[[int], bool]) -> int:
    """Ask, a few at a time, for as long as it goes on; return how many calls were answered."""
    asked = 0
    with ThreadPoolExecutor(PEOPLE) as pool:
        while goes_on(asked):
            list(pool.map(lambda number: ask(client, number), range(asked, asked + PEOPLE)))
            asked += PEOPLE
    return asked


def ask(client: httpx.Client, number: int) -> None:
    """Ask as a person does, and read the stream to its end."""
    answer = client.post("/v1/chat/completions", json=body(1_000_000 + number, max_tokens=12, stream=True))
    assert answer.status_code == 200 and answer.text.rstrip().endswith("[DONE]"), answer.text


def body(number: int, **more: Any) -> dict[str, Any]:
    """Return a request that nobody else makes."""
    text = f"{number}: {QUESTIONS[number % len(QUESTIONS)]}"
    return {"model": "tollgate-demo", "messages": [{"role": "user", "content": text}], **more}


def steps_of(engine: httpx.Client, tier: str) -> Counter[float]:
    """Return how many calls of a tier waited up to so many steps, but more than the bound before."""
    found = BUCKET.findall(engine.get("/metrics").raise_for_status().text)
    counts, below = Counter[float](), 0.0
    for bound, of_tier, count in found:
        if of_tier == tier:
            counts[float(bound)] = int(float(count) - below)
            below = float(count)
    return counts


def quantile(counts: Counter[float], share: float) -> float:
    """Return the bound within which so large a part of the calls is."""
    left = share * counts.total()
    for bound in sorted(counts):
        left -= counts[bound]
        if left <= 0:
            return bound
    raise AssertionError("no calls were counted")


def write_table(measured: dict[str, Any]) -> None:
    """Write the results where the others are."""
    today = datetime.now(UTC).date()
    rows = []
    for name, key in (("without a batch", "without"), ("beside the batch", "with"), ("the batch's own lines", "lines")):
        counts: Counter[float] = measured[key]
        figures = [f"{quantile(counts, share):g}" for share in (0.5, 0.9, 0.99, 1.0)]
        rows.append(f"| {name} | {counts.total()} | {' | '.join(figures)} |")
    page = (
        f"# People beside a batch, {today}\n\n"
        f"`python -m pytest -m soak tests/soak/test_batch_beside_people.py` on {os.cpu_count()} cores "
        f"({platform.machine()}), the demo model on the CPU, through gateway and worker. A batch of {LINES} lines, "
        f"each of up to 32 tokens, took {measured['seconds']:.0f} s, while {PEOPLE} people asked all the time, for up "
        "to 12 tokens.\n\n"
        "Steps of the engine from a request's arrival to its first token, that step included:\n\n"
        "| who | calls | p50 | p90 | p99 | most |\n| --- | --- | --- | --- | --- | --- |\n" + "\n".join(rows) + "\n"
    )
    print(page)
    (RESULTS / f"batch-beside-people-{today}.md").write_text(page)
