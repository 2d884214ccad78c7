# The simulator: virtual time adds up, the figures are those of the requests, and the command prints them.

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_backend.simulate.__main__ import main
from gpu_backend.simulate.hardware import DEVICES, MODELS, copy_seconds, step_cost
from gpu_backend.simulate.replica import NO_HOST_MEMORY, HostMemory, replay
from gpu_backend.simulate.report import Promise, make_report, percentile
from gpu_backend.simulate.traces import TraceRequest
from gpu_backend.step.config import EngineConfig, engine_config
from gpu_backend.step.cost import StepCost, StepWork, chunk_work
from tests.support.traces import AZURE_CHAT, trace_path
from tools.simulate.pressure import Workload, make_replica, try_out

# A tenth of a second a step, a millisecond a token beyond the hundred that hide behind the weights.
PLAIN = StepCost(fixed=0.0, weights=0.1, token=0.001, context=0.0, pair=0.0)


def config(**settings: int) -> EngineConfig:
    return engine_config(model="", **{"max_num_seqs": 8, "max_num_batched_tokens": 400, **settings})  # type: ignore[arg-type]


def test_step_costs_add_up() -> None:
    """Products hide behind the reading of the weights until there are too many; context and pairs come on top."""
    cost = StepCost(fixed=1.0, weights=10.0, token=1.0, context=0.1, pair=0.01)

    assert cost.seconds(StepWork(tokens=4)) == 11.0
    assert cost.seconds(StepWork(tokens=15)) == 16.0
    assert cost.seconds(StepWork(4, 100, 100)) == pytest.approx(11.0 + 10.0 + 1.0)
    assert chunk_work(10, 3) == StepWork(3, 13, 11 + 12 + 13, prompts=1)
    assert replace(cost, launching=5.0).seconds(StepWork(4, 100, 100)) == cost.seconds(StepWork(4, 100, 100))
    assert replace(cost, launching=5.0).seconds(chunk_work(10, 3)) == cost.seconds(chunk_work(10, 3)) + 5.0


def test_published_measurement_is_met() -> None:
    """An 8B model on one H100 decodes one sequence in 6.44 ms and 43.7 ns a token of context (vLLM's figures)."""
    cost = step_cost(MODELS["llama-8b"], DEVICES["h100"])

    assert cost.seconds(StepWork(1, 0, 0)) == pytest.approx(6.44e-3, rel=0.02)
    assert cost.context == pytest.approx(43.7e-9, rel=0.02)


def test_client_sees_the_steps_of_the_clock() -> None:
    """The first token comes a step after arrival, the next a step later; a step in progress is waited for."""
    requests = [TraceRequest(0.0, 50, 3), TraceRequest(0.25, 150, 2)]

    (replica,) = replay(requests, config(), PLAIN, num_blocks=100)
    first, second = replica.outcomes["0"], replica.outcomes["1"]

    assert (first.first_token, first.last_token, first.tokens) == (pytest.approx(0.1), pytest.approx(0.3), 3)
    assert (second.first_token, second.last_token) == (pytest.approx(0.45), pytest.approx(0.55))
    assert sorted(replica.gaps) == pytest.approx([0.1, 0.1, 0.1])


def test_report_counts_what_was_promised() -> None:
    """Goodput is what met the promise; occupancy is the mean over busy time."""
    requests = [TraceRequest(0.0, 50, 3), TraceRequest(0.0, 50, 3), TraceRequest(0.25, 250, 2)]

    served = replay(requests, config(), PLAIN, num_blocks=100)
    strict = make_report(served, Promise(first_token=0.12, gap=0.2), 8)
    mild = make_report(served, Promise(first_token=0.5, gap=0.2), 8)

    assert (strict.requests, strict.refused) == (3, 0)
    assert strict.goodput_share == pytest.approx(2 / 3)
    assert mild.goodput_share == 1.0
    assert mild.goodput == pytest.approx(3 / mild.seconds)
    assert mild.slot_occupancy == pytest.approx((0.3 * 2 + 0.25 + 0.1) / 0.65 / 8)
    assert mild.recomputed == 1.0


def test_copies_to_host_memory_take_their_time() -> None:
    """A step waits for its copies; what is swapped is not computed again, as long as copies take less."""
    workload = Workload(150, 250, mu=5.2, sigma=0.4, num_blocks=60)
    again, swapped, dear = (
        make_replica("llama-8b", "h200", workload.num_blocks, "whatever fits", host)
        for host in (NO_HOST_MEMORY, HostMemory(500, copy_seconds=1e-5), HostMemory(500, copy_seconds=1.0))
    )
    none, cheap, slow = (try_out(replica, workload.requests(24), 8).report for replica in (again, swapped, dear))

    assert none.preemptions > 0 and (none.swaps, none.copying) == (0, 0.0)
    assert cheap.swaps > 0 and cheap.recomputed < none.recomputed
    assert 0 < cheap.copying < 0.1 < slow.copying
    assert slow.swaps == 0


def test_link_to_the_host_is_what_copies_take() -> None:
    """16 tokens of an 8B model are 2 MiB; four fifths of 64 GB/s move them in 41 µs, on two devices in half of it."""
    model, device = MODELS["llama-8b"], DEVICES["h200"]

    assert copy_seconds(model, device, 1, 16) == pytest.approx(2 * 2**20 / 51.2e9)
    assert copy_seconds(model, device, 2, 16) == pytest.approx(2 * 2**20 / 102.4e9)


def test_requests_go_to_the_replica_with_the_least_to_do() -> None:
    """Two replicas share a burst; one device less would make it wait longer."""
    requests = [TraceRequest(0.0, 100, 10)] * 16

    one = make_report(replay(requests, config(), PLAIN, 1000), Promise(), 8)
    served = replay(requests, config(), PLAIN, 1000, num_replicas=2)

    assert [len(replica.outcomes) for replica in served] == [8, 8]
    assert make_report(served, Promise(), 8).ttft_p99 < one.ttft_p99


def test_percentiles() -> None:
    """The smallest value that at least such a share does not exceed."""
    assert percentile([], 0.5) == 0.0
    assert [percentile(range(1, 101), share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 51, 100, 100]


def test_command_prints_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line of JSON, or a line for each figure; a fault is told, with exit status 1."""
    trace = tmp_path / "trace.csv"
    rows = "".join(f"2023-11-16 18:17:0{i}.0,{100 + i},{5 + i}\n" for i in range(6))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)

    assert main(["--trace", str(trace), "--gpus", "2", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert main(["--trace", str(trace), "--gpus", "2"]) == 0
    text = capsys.readouterr().out
    assert main(["--trace", str(trace), "--gpus", "3", "--gpus-per-replica", "2"]) == 1
    assert "no multiple" in capsys.readouterr().err
    assert main(["--trace", str(tmp_path / "absent.csv")]) == 1

    assert figures["requests"] == 6
    assert figures["goodput_share"] == 1.0
    assert all(name in text for name in ("ttft_p90", "gap_p99", "goodput", "hit_rate", "slot_occupancy"))


def test_azure_chat_fits_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    """The first minute of Azure's chat trace gets its first tokens within a second on one H200."""
    trace = trace_path(AZURE_CHAT)

    assert main(["--trace", str(trace), "--seconds", "60", "--gpus", "1", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)

    assert figures["requests"] > 150
    assert figures["goodput_share"] > 0.99
