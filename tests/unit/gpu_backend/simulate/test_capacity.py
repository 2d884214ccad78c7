# The planner's arithmetic against figures worked out by hand, its search against the simulator, and the comparisons.

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpu_backend.simulate.capacity import ReplicaShape, main, requests_per_replica
from gpu_backend.simulate.cards import Layout, least_layout, page
from gpu_backend.simulate.hardware import (
    CONTEXT_SHARE,
    DEVICES,
    MODELS,
    PUBLISHED,
    least_gpus,
    model_of,
    resident_tokens,
    step_cost,
)
from gpu_backend.simulate.traces import TraceRequest
from gpu_backend.step.cost import StepCost, StepWork
from tools.simulate.compare import continuous, shared_benchmark, sharing_row, static_batches

TENTH = StepCost(fixed=0.1, weights=0.0, token=0.0, context=0.0, pair=0.0)


def test_planner_knows_a_70b_model_on_four_devices(capsys: pytest.CaptureFixture[str]) -> None:
    """320 GB less 140 of weights hold 549k tokens of 327,680 bytes; 1,000 users need 8 replicas of 4,000 tokens/s."""
    arguments = ["--model", "llama-70b", "--device", "h100", "--gpus-per-replica", "4", "--users", "1000"]

    assert main([*arguments, "--tokens-per-user", "30", "--replica-tokens-per-second", "4000"]) == 0
    figures = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])
    figures = {name.strip(): int(value) for name, value in figures.items()}

    assert figures == {
        "kv_bytes_per_token": 327_680,
        "resident_tokens": 549_316,
        "sequences_of_2048": 268,
        "replicas": 8,
        "gpus": 32,
    }


@pytest.mark.parametrize(
    ("model", "weight_bytes", "gpus"),
    [("llama-7b", 2, 1), ("llama-70b", 2, 2), ("llama-70b", 0.5, 1), ("llama-405b", 2, 16), ("llama-405b", 1, 8)],
)
def test_least_devices_of_80_gb(model: str, weight_bytes: float, gpus: int) -> None:
    """As many as hold the weights and one long sequence, in powers of two."""
    assert least_gpus(MODELS[model], DEVICES["h100"], weight_bytes) == gpus


def test_mixture_of_experts_has_the_memory_of_all_and_the_products_of_some() -> None:
    """Mixtral takes the devices of 46.7 billion weights, a long prompt little more time than 12.9 billion's; one reply
    reads as many."""
    mixture, device = MODELS["mixtral-8x7b"], DEVICES["h100"]
    dense = replace(mixture, experts=0.0)
    costs = [step_cost(model, device, 2) for model in (mixture, dense)]

    assert least_gpus(mixture, device) == 2
    assert costs[0].weights == costs[1].weights and costs[1].token / costs[0].token == pytest.approx(3.6, rel=0.05)
    assert mixture.bytes_read(tokens=1) / 2e9 == pytest.approx(12.9, rel=0.02)


def test_latent_vectors_lie_on_every_device() -> None:
    """Of DeepSeek-V3 eight cards hold as many tokens as the least room of one does, each 61 · 576 numbers long."""
    model, device = MODELS["deepseek-v3"], DEVICES["h200"]
    room = 141e9 * 0.9 - model.weight_bytes(1, gpus=8) / 8

    assert model.kv_bytes_per_token() == 61 * 576 * 2
    assert resident_tokens(model, device, 8, 1, memory_share=0.9) == int(room / (61 * 576 * 2))
    assert model.pair_operations == 61 * 128 * 2 * (576 + 512)
    assert step_cost(model, device, 8).context == pytest.approx(step_cost(model, device, 1).context)


def test_states_take_the_room_and_the_time_of_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """Of Qwen3-Next three of four layers keep 32 · 128 · 128 numbers in float32 of a sequence, however long it is, and
    what a convolution saw; there are states of one sequence more than run. A decode reads and writes them."""
    model, device, config = MODELS["qwen3-next-80b-a3b"], DEVICES["h100"], PUBLISHED["Qwen3-Next-80B-A3B"]
    state, key = 36 * (4 * 32 * 128 * 128 + 2 * 3 * 8192), 12 * 2 * 2 * 256 * 2
    room = 2 * 80e9 - model.weight_bytes(1, gpus=2)
    layout = Layout(config, "fp8", device, 2, False, 1)
    reading = 64 * (2048 * key + 2 * state) / (2 * 3.35e12 * CONTEXT_SHARE)
    beside = step_cost(model, device, 2, 1, tokens=64).seconds(StepWork(64, 0, 64 * 2048))

    assert (model.kv_bytes_per_token(), model.state_bytes) == (key, state)
    assert resident_tokens(model, device, 2, 1, sequences=256) == int((room - 257 * state) / key)
    assert layout.sequences(8192) == int((room - 0.1 * 2 * 80e9 - state) / (8192 * key + state))
    assert 64 / (layout.decoded(64) or 1) == pytest.approx(beside + reading, rel=1e-4)
    asked = ["--model", "qwen3-next-80b-a3b", "--precision", "int4", "--prompt", "8000", "--reply", "2000"]
    assert main([*asked, "--replica-tokens-per-second", "1"]) == 0
    fitting = int((80e9 - model.weight_bytes(17 / 32) - state) / (10_000 * key + state))
    assert f"max_num_seqs                 {fitting}\n" in capsys.readouterr().out


def test_tower_lies_whole_on_every_device() -> None:
    """In 16 bits, however the decoder's weights are rounded: what remains is the KV cache's."""
    sees, device = MODELS["mistral-small-24b"], DEVICES["h100"]
    missing = 2 * 2 * sees.tower_parameters / sees.kv_bytes_per_token()

    blind = resident_tokens(replace(sees, tower_parameters=0.0), device, 2, 0.5)
    assert blind - resident_tokens(sees, device, 2, 0.5) == pytest.approx(missing, abs=1)


def test_head_takes_as_long_on_several_devices() -> None:
    """Each has all of it: only what is cut takes a part of the time."""
    model, device = MODELS["llama-3.1-8b"], DEVICES["l4"]
    heads = [
        step_cost(model, device, gpus).weights - step_cost(replace(model, head=0.0), device, gpus).weights
        for gpus in (1, 4)
    ]

    assert heads[0] == pytest.approx(heads[1]) and heads[0] == pytest.approx(2 * 128_256 * 4096 / (0.3e12 * 0.77))


def test_page_of_cards_is_what_the_planner_says() -> None:
    """Table by table; and the sizes are those that publishers tell, to a hundredth."""
    told = (Path(__file__).parents[4] / "docs/operations/cards.md").read_text()
    published = {
        "Qwen3-235B-A22B": 235,
        "Llama-3.1-405B": 405,
        "gpt-oss-120b": 117,
        "DeepSeek-V3": 671,
        "Kimi-K2": 1030,
        "Qwen3-Next-80B-A3B": 80,
        "Qwen3.5-397B-A17B": 397,
    }

    assert told.endswith("\n\n" + "\n".join(page()) + "\n")
    for name, billions in published.items():
        assert model_of(PUBLISHED[name]).weight_bytes() / 2e9 == pytest.approx(billions, rel=0.01)


def test_layout_is_what_divides_over_ranks() -> None:
    """Four ranks would cut through GPT-OSS' groups of 32 inputs: each has experts of its own. Eight would cut through
    the four key heads of Qwen3-235B, four through the two of Qwen3-Next: there are two stages."""
    names = ("gpt-oss-120b", "Qwen3-235B-A22B", "Qwen3-Next-80B-A3B")
    found = [least_layout(PUBLISHED[name], DEVICES["l4"]) for name in names]

    assert [layout and (layout.ranks, layout.by_expert, layout.stages) for layout in found] == [
        (4, True, 1),
        (4, False, 2),
        (2, False, 2),
    ]


def test_model_that_does_not_fit_is_told_with_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the least number of devices; where a sequence alone does not fit, how long one may be."""
    assert main(["--model", "llama-405b", "--gpus-per-replica", "4"]) == 1
    assert "at least 16" in capsys.readouterr().err
    assert main(["--model", "llama-70b", "--gpus-per-replica", "2", "--prompt", "90000"]) == 1
    assert "2 x h100 hold 61,035 tokens beside llama-70b, less than a sequence of 91,024" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "device", "precision", "why"),
    [
        ("llama-8b", "a100-80gb", "fp8", "float8 needs compute capability 8.9 or more"),
        ("qwen3.6-27b", "a100-80gb", "fp8", "float8 needs compute capability 8.9 or more"),
        ("glm-4.7-flash", "l40s", "bf16", "attention over latent vectors does not fit"),
    ],
)
def test_what_the_engine_refuses_is_not_planned(
    model: str, device: str, precision: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A device that cannot compile a model's kernels has no replicas of it, and no line in the table."""
    assert main(["--model", model, "--device", device, "--precision", precision]) == 1
    assert why in capsys.readouterr().err
    assert main(["--device", device, "--table"]) == 0
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]

    assert [model, precision] not in lines and ["llama-8b", "int4"] in lines


def test_a_stricter_promise_takes_less_load() -> None:
    """What one replica can take falls with the time that the first token may take."""
    shape = ReplicaShape(MODELS["llama-70b"], DEVICES["h100"], 4, 2)

    strict, mild = (requests_per_replica(shape, 2000, 20, ttft, 8.0, requests=12) for ttft in (0.4, 2.0))

    assert 0 < strict < mild <= 8


def test_shared_benchmark_is_the_one_others_publish() -> None:
    """Seed 0 gives exactly these sums of prompt and reply tokens."""
    requests = shared_benchmark()

    assert sum(r.prompt_tokens for r in requests) == 142_827
    assert sum(r.output_tokens for r in requests) == 133_966


def test_static_batches_wait_for_their_longest() -> None:
    """Two batches of two take 10 and 4 steps for 18 tokens; continuously, the same slots are done after fewer."""
    requests = [TraceRequest(0.0, 10, length) for length in (10, 2, 2, 4)]

    occupancy, rate = static_batches(requests, 2, TENTH)
    replica = continuous(requests, 2, TENTH, num_blocks=100)

    assert occupancy == pytest.approx(18 / 28)
    assert rate == pytest.approx(18 / 1.4)
    assert replica.runner.now == pytest.approx(1.0)


def test_shared_system_prompts_save_memory_and_arithmetic() -> None:
    """The longer the common beginning, the more is saved of both."""
    short, long = (sharing_row(length, TENTH, 40).split("|")[4:6] for length in (500, 2000))

    assert all(0 < int(a.strip(" %")) < int(b.strip(" %")) for a, b in zip(short, long, strict=True))
