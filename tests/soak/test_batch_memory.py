# The largest input that a batch may have: six lines of 31 MiB in one file, and a file that is one line of 199 MiB. What
# it adds to the memory of gateway and worker stays below 200 MB, whichever way it comes.

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fault_house import FaultHouse, running_fault_house
from tests.support.fault_service import run_tollgate

MIB = 2**20
MOST_MEMORY = 200e6  # bytes that a batch may add to a process
URL = "/v1/chat/completions"
FRAME = {"method": "POST", "url": URL}

pytestmark = pytest.mark.soak


@pytest.mark.timeout(900)
def test_the_largest_lines_need_little_memory(tmp_path: Path) -> None:
    """Lines of 31 MiB are answered, one of 199 MiB is a fault with its line; neither fills the memory."""
    with running_fault_house(tmp_path, run=run_tollgate) as house:
        house.config.write_text(house.config.read_text().replace("context: 4000", "context: 100000000"))
        for service in (house.gateways[0], house.worker):
            service.end()
            service.start()
        key = next(iter(house.make_team("large", {}, [{}]).values()))
        headers = {"authorization": f"Bearer {key}"}
        with httpx.Client(base_url=house.gateways[0].url, headers=headers, timeout=300) as client:
            idle = memory_of(house)
            answered = ended(client, large_lines(6, 31 * MIB))
            results = client.get(f"/v1/batch/{answered['batch_id']}/results").raise_for_status().text
            after_lines = memory_of(house)
            refused = ended(client, one_line(199 * MIB))
            after_all = memory_of(house)
    for name in idle:
        lines, whole = (measured[name] - idle[name] for measured in (after_lines, after_all))
        print(
            f"{name}: {idle[name] / 1e6:.0f} MB idle, {lines / 1e6:+.0f} MB for long lines, {whole / 1e6:+.0f} in all"
        )

    statuses = [json.loads(line)["response"]["status_code"] for line in results.splitlines()]
    assert (answered["status"], statuses) == ("completed", [200] * 6)
    assert (refused["status"], [error["code"] for error in refused["errors"]]) == ("failed", ["line_too_long"])
    assert max(after_all[name] - idle[name] for name in idle) < MOST_MEMORY


def large_lines(count: int, size: int) -> Iterator[bytes]:
    """Yield lines of requests with a long prompt."""
    for number in range(count):
        message = {"role": "user", "content": "toll " * (size // 5)}
        line = {
            "custom_id": f"c{number}",
            **FRAME,
            "body": {"model": "instant", "max_tokens": 8, "messages": [message]},
        }
        yield json.dumps(line).encode() + b"\n"


def one_line(size: int) -> Iterator[bytes]:
    """Yield a line that is longer than any that is read."""
    yield b'{"custom_id":"'
    for _ in range(size // MIB):
        yield b"x" * MIB
    yield b'"}\n'


def ended(client: httpx.Client, parts: Iterator[bytes]) -> dict[str, Any]:
    """Upload a file, make a batch of it, and wait until it has ended."""
    border = "a-border-that-is-in-no-line"
    head = 'Content-Disposition: form-data; name="{}"{}\r\n\r\n'

    def form() -> Iterator[bytes]:
        yield f"--{border}\r\n{head.format('purpose', '')}batch\r\n".encode()
        yield (f"--{border}\r\n" + head.format("file", '; filename="large.jsonl"')).encode()
        yield from parts
        yield f"\r\n--{border}--\r\n".encode()

    kind = {"content-type": f"multipart/form-data; boundary={border}"}
    file_id = client.post("/v1/files", content=form(), headers=kind).raise_for_status().json()["id"]
    asked = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h"}
    batch_id = client.post("/v1/batches", json=asked).raise_for_status().json()["id"]
    deadline = time.monotonic() + 400
    while True:
        batch: dict[str, Any] = client.get(f"/v1/batch/{batch_id}").raise_for_status().json()
        if batch["ended_at"] is not None:
            return batch
        assert time.monotonic() < deadline, batch
        time.sleep(0.25)


def memory_of(house: FaultHouse) -> dict[str, int]:
    """Return the most memory that each process had so far, in bytes."""
    found = {}
    for name, service in (("gateway", house.gateways[0]), ("worker", house.worker)):
        status = Path(f"/proc/{service.pid}/status").read_text()
        found[name] = 1024 * int(status.split("VmHWM:")[1].split()[0])
    return found
