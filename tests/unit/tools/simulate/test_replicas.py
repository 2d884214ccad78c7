# What is cached where decides: what the tables of ``python -m tools.simulate.replicas`` rest on.

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tools.simulate.replicas import main


def test_conversations_are_found_where_their_events_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Five conversations of four turns at two replicas: what is expected to be cached is, to a block for each turn."""
    turns = [
        {"timestamp": 4000 * turn + 700 * number, "input_length": 1024 * (turn + 1), "output_length": 4}
        | {"hash_ids": [0, *(100 * number + block for block in range(1, 2 * turn + 2))]}
        for turn in range(4)
        for number in range(5)
    ]
    trace = tmp_path / "trace.jsonl.gz"
    trace.write_bytes(gzip.compress("\n".join(map(json.dumps, turns)).encode()))
    assert main(["--trace", str(trace), "--speeds", "1", "--replicas", "2", "--tenants", "1"]) == 0
    rows = [[cell.strip() for cell in line.split("|")[2:5]] for line in capsys.readouterr().out.splitlines()[2:]]
    found = {order: (float(hits), float(expected)) for order, hits, expected in rows}

    assert found["events"][0] >= found["rendezvous"][0] > 0.4
    assert found["events"][1] == pytest.approx(found["events"][0], abs=0.05)
    assert found["load"][1] == 0
