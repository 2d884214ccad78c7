# Traces as their publishers write them, and the public ones where they are at hand.

from __future__ import annotations

import gzip
import json
import tarfile
from collections import Counter
from pathlib import Path

import pytest

from gpu_backend.simulate.traces import MOONCAKE_BLOCK, TraceRequest, read_trace, share_out
from tests.support.traces import AZURE_CHAT, AZURE_CODE, MOONCAKE, SERVEGEN, trace_path


def test_azure_rows_are_requests(tmp_path: Path) -> None:
    """Arrivals count from the first row, with seven decimals of a second; no length is zero."""
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.2299600,3180,0\n2023-11-16 18:18:04.0,7,1\n"
    )

    requests = read_trace(path, seconds=10)

    assert requests == [TraceRequest(0.0, 4808, 10), TraceRequest(0.25, 3180, 1)]


def test_mooncake_prompts_share_what_their_hashes_share(tmp_path: Path) -> None:
    """Equal hash ids make equal tokens, a block's worth each; the last block is cut to the prompt's length."""
    path = tmp_path / "trace.jsonl.gz"
    rows = [
        {"timestamp": 500, "input_length": 700, "output_length": 3, "hash_ids": [0, 1]},
        {"timestamp": 1500, "input_length": 1100, "output_length": 4, "hash_ids": [0, 2, 3]},
    ]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))

    first, second = read_trace(path)
    one, other = first.prompt(0), second.prompt(1)

    assert (first.arrival, second.arrival) == (0.5, 1.5)
    assert (len(one), len(other)) == (700, 1100)
    assert one[:MOONCAKE_BLOCK] == other[:MOONCAKE_BLOCK]
    assert one[MOONCAKE_BLOCK] != other[MOONCAKE_BLOCK]


def test_servegen_clients_are_tenants_with_their_own_rates(tmp_path: Path) -> None:
    """Requests are drawn window by window; lengths come from the client's distribution of that time."""
    folder = tmp_path / "data" / "m"
    folder.mkdir(parents=True)
    for client, rate in ((1, 2.0), (2, 0.0), (3, 0.5)):
        (folder / f"chunk-{client}-trace.csv").write_text(f"0,0,0,,0,0\n600,{rate},1.0,Gamma,0,0\n1200,9,1,Gamma,0,0\n")
        lengths = {"input_tokens": f"{{{client * 10}: 0.5, {client * 10 + 1}: 0.5}}", "output_tokens": "{7: 1.0}"}
        (folder / f"chunk-{client}-dataset.json").write_text(json.dumps({"0": lengths}))
    path = tmp_path / "m.tar.xz"
    with tarfile.open(path, "w:xz") as archive:
        archive.add(folder, "data/m")

    requests = read_trace(path, start=600, seconds=600, seed=3)
    counts = Counter(request.tenant for request in requests)

    assert requests == read_trace(path, start=600, seconds=600, seed=3)
    assert [request.arrival for request in requests] == sorted(request.arrival for request in requests)
    assert counts["chunk-1"] == pytest.approx(1200, rel=0.15)
    assert counts["chunk-3"] == pytest.approx(300, rel=0.3)
    assert counts.keys() == {"chunk-1", "chunk-3"}
    assert {request.prompt_tokens for request in requests if request.tenant == "chunk-1"} == {10, 11}
    with pytest.raises(ValueError, match="--seconds"):
        read_trace(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    """The error names what a trace looks like."""
    with pytest.raises(ValueError, match="Azure"):
        read_trace(tmp_path / "trace.txt")


def test_requests_are_shared_out_among_tenants_and_tiers() -> None:
    """The first tenant is twice as busy as the second; a tenant that the trace names stays."""
    requests = [TraceRequest(float(i), 1, 1, tenant="known" if i == 0 else "") for i in range(6000)]

    shared = share_out(requests, tenants=2, batch_share=0.25)
    counts = Counter(request.tenant for request in shared)

    assert shared[0].tenant == "known"
    assert counts["tenant-0"] / counts["tenant-1"] == pytest.approx(2, rel=0.1)
    assert sum(request.tier == "batch" for request in shared) == pytest.approx(1500, rel=0.1)


@pytest.mark.parametrize(("name", "rows"), [(AZURE_CHAT, 19_366), (AZURE_CODE, 8_819), (MOONCAKE, 12_031)])
def test_public_traces_are_read_whole(name: str, rows: int) -> None:
    """Every row of the published file is a request."""
    assert len(read_trace(trace_path(name))) == rows


def test_servegen_has_a_client_with_a_third_of_the_load() -> None:
    """Tenants as they are: the busiest has some 30 % of all requests."""
    counts = Counter(request.tenant for request in read_trace(trace_path(SERVEGEN), start=400_000, seconds=60))

    assert len(counts) > 10
    assert 0.2 < max(counts.values()) / counts.total() < 0.5
