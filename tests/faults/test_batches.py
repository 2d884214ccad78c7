# A large batch survives whatever dies: workers, gateway and Postgres are killed while it runs. Afterwards every line
# has exactly one result, is paid once, and every attempt whose answer was lost is on the books at no cost. In a soak
# the table lands in benchmarks/results/.

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from tests.support.fault_house import FaultHouse, running_fault_house

TEAM = "batchers"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MOST_MEMORY = 200e6  # bytes that a batch may add to a process


@pytest.mark.soak  # a killed worker is in test_money.py, and in tests/acceptance/test_batches.py
@pytest.mark.timeout(280)
def test_a_batch_survives_a_kill(tmp_path: Path) -> None:
    """400 lines, and a worker killed in the middle."""
    play(tmp_path, lines=400, kills=1, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_large_batch_survives_ten_kills(tmp_path: Path) -> None:
    """50,000 lines, and workers, gateway and Postgres killed ten times."""
    write_table(play(tmp_path, lines=50_000, kills=10, seed=2))


def play(folder: Path, *, lines: int, kills: int, seed: int) -> dict[str, Any]:
    """Run a batch of ``lines`` through ``kills``; return what was measured, or fail."""
    dice = random.Random(seed)
    with running_fault_house(folder, gateways=1, workers=2) as house:
        key = next(iter(house.make_team(TEAM, {}, [{}]).values()))
        idle = memory_of(house)
        with httpx.Client(
            base_url=house.gateways[0].url, headers={"authorization": f"Bearer {key}"}, timeout=120
        ) as client:
            started = time.monotonic()
            batch_id = submit(client, lines)
            batch = kill_and_wait(house, client, batch_id, lines, kills, dice)
            seconds = time.monotonic() - started
            grown = {name: memory_of(house)[name] - idle[name] for name in idle}
            results = [json.loads(line) for line in read(client, batch_id)]
        wrong = asyncio.run(differences(house, batch, results, lines))
        asked = Counter(seen.body["messages"][0]["content"] for seen in house.upstream.requests)  # type: ignore[union-attr]
        logged = [line for line in house.new_log_lines() if "Traceback" in line or "chore_ended" in line]

    assert wrong == []
    assert logged == []
    assert max(grown.values()) < MOST_MEMORY
    return {
        "lines": f"{lines:,}",
        "killed": kills,
        "results": f"{len(results):,}",
        "duplicates": len(results) - len({line["custom_id"] for line in results}),
        "paid": f"{batch['request_counts']['completed']:,}",
        "asked of the upstream again": f"{sum(asked.values()) - len(asked):,}",
        "seconds": f"{seconds:.0f}",
        "lines/s": f"{lines / seconds:.0f}",
        "memory that the batch added": ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in grown.items()),
    }


def submit(client: httpx.Client, lines: int) -> str:
    """Upload a file and make a batch of it."""
    body = {"model": "instant", "max_tokens": 48}
    url = "/v1/chat/completions"
    file = "\n".join(
        json.dumps(
            {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": url,
                "body": {**body, "messages": [{"role": "user", "content": f"Line {number}."}]},
            }
        )
        for number in range(lines)
    )
    form = {"file": ("lines.jsonl", file.encode()), "purpose": (None, "batch")}
    file_id = client.post("/v1/files", files=form).raise_for_status().json()["id"]
    asked = {"input_file_id": file_id, "endpoint": url, "completion_window": "24h"}
    return str(client.post("/v1/batches", json=asked).raise_for_status().json()["id"])


def kill_and_wait(
    house: FaultHouse, client: httpx.Client, batch_id: str, lines: int, kills: int, dice: random.Random
) -> dict[str, Any]:
    """Kill something whenever so much is done, until the batch has ended."""
    moments = [lines * (number + dice.uniform(0.1, 0.9)) / (kills + 1) for number in range(kills)]
    victims = ["worker 0", "worker 1", "Postgres", "gateway 0"]
    deadline = time.monotonic() + 60 + lines / 20 + 60 * kills
    while True:
        assert time.monotonic() < deadline, "the batch does not end"
        time.sleep(0.25)
        try:
            batch: dict[str, Any] = client.get(f"/v1/batch/{batch_id}").raise_for_status().json()
        except httpx.HTTPError:
            continue
        if batch["ended_at"] is not None:
            return batch
        if moments and batch["request_counts"]["completed"] >= moments[0]:
            moments.pop(0)
            strike(house, victims[(kills - len(moments) - 1) % len(victims)], dice)


def strike(house: FaultHouse, victim: str, dice: random.Random) -> None:
    """Kill a part of the house, and start it again a little later."""
    services = {service.name: service for service in house.services}
    if victim == "Postgres":
        house.kill_server(house.postgres)
        time.sleep(dice.uniform(0, 2))
        house.postgres.start()
    else:
        services[victim].kill()
        time.sleep(dice.uniform(0, 2))
        services[victim].start()


def read(client: httpx.Client, batch_id: str) -> Iterator[str]:
    """Yield the lines of the results."""
    with client.stream("GET", f"/v1/batch/{batch_id}/results") as answer:
        answer.raise_for_status()
        yield from answer.iter_lines()


async def differences(house: FaultHouse, batch: dict[str, Any], results: list[dict[str, Any]], lines: int) -> list[str]:
    """Hold the results against the input, the ledger, the batch and the usage report."""
    wrong = []
    if [line["custom_id"] for line in results] != [f"line-{number}" for number in range(lines)]:
        wrong.append(f"{len(results)} results, not one for each of {lines} lines in their order")
    wrong += [str(line) for line in results if line["response"]["status_code"] != 200][:5]
    if batch["request_counts"] != {"total": lines, "completed": lines, "failed": 0}:
        wrong.append(f"the batch counts {batch['request_counts']}")
    cost = sum(round(float(line["response"]["body"]["usage"]["cost_usd"]) * 10**9) for line in results)
    deadline = time.monotonic() + 60
    while found := await in_ledger(house, batch, results, lines, cost):
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.5)
    return wrong + found


async def in_ledger(
    house: FaultHouse, batch: dict[str, Any], results: list[dict[str, Any]], lines: int, cost: int
) -> list[str]:
    """Say where the ledger and the sums differ from what was answered; what the dead left may yet come."""
    wrong = []
    connection = await asyncpg.connect(house.postgres.url, timeout=10)
    try:
        rows = await connection.fetch("SELECT request_id, client_request_id, status, cost_nanousd FROM usage_records")
    finally:
        await connection.close()
    paid = {row["client_request_id"]: str(row["request_id"]) for row in rows if row["status"] == "answered"}
    told = {f"{batch['batch_id']}:{place}": line["response"]["request_id"] for place, line in enumerate(results)}
    if paid != told or sum(row["status"] == "answered" for row in rows) != lines:
        wrong.append(f"{len(paid)} lines are paid, {len(told)} have an answer, or by another attempt")
    if others := Counter(row["status"] for row in rows if row["status"] not in ("answered", "superseded", "failed")):
        wrong.append(f"rows of {dict(others)}")
    booked = sum(row["cost_nanousd"] for row in rows)
    if not booked == cost == round(batch["usage"]["cost_usd"] * 10**9):
        wrong.append(f"the rows cost {booked}, the answers {cost}, the batch {batch['usage']['cost_usd']}")
    report = house.ask_admin(house.gateways[0], "/v1/usage", team_id=TEAM).json()
    if (report["requests"], round(report["cost_usd"] * 10**9)) != (lines, cost):
        wrong.append(f"the usage report says {report['requests']} requests for {report['cost_usd']}")
    return wrong


def memory_of(house: FaultHouse) -> dict[str, int]:
    """Return the most memory that each process had so far, in bytes."""
    found = {}
    for service in house.services:
        status = Path(f"/proc/{service.pid}/status").read_text()
        found[service.name] = 1024 * int(status.split("VmHWM:")[1].split()[0])
    return found


def write_table(measured: dict[str, Any]) -> None:
    """Write the results where the others are."""
    today = datetime.now(UTC).date()
    lines = [
        f"# A large batch through kills, {today}",
        "",
        f"`python -m pytest -m soak tests/faults/test_batches.py` on {os.cpu_count()} cores ({platform.machine()}), "
        f"load average {[round(load, 1) for load in os.getloadavg()]}: two workers, a gateway and a scripted "
        "upstream share them. Workers, Postgres and the gateway are killed with SIGKILL in turn and started again.",
        "",
        "| what | measured |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in measured.items()),
    ]
    (RESULTS / f"batch-{today}.md").write_text("\n".join(lines) + "\n")
