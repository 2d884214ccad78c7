# The least time of a step, against sums done by hand.

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpu_backend.execution.runner import Runner
from gpu_backend.hardware.roofline import HardwarePeaks, Roofline, measure_peaks
from gpu_backend.models.config.model import load_model_config
from gpu_backend.models.llama import load_model
from gpu_backend.models.shards import config_of_rank, num_bytes, shard
from gpu_backend.models.weights import Checkpoint
from gpu_backend.step.config import engine_config
from gpu_backend.step.plan import SequenceStep, StepPlan
from gpu_backend.step.sampling_params import SamplingParams
from tests.support.tiny_model import TinyModel, write_tiny_model


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder = write_tiny_model(tmp_path_factory.mktemp("qwen"), TinyModel("Qwen3ForCausalLM"))
    return Runner(
        engine_config(str(folder), device="cpu", max_model_len=64, num_kv_blocks=8), load_model_config(folder)
    )


def decode(start: int, **fields: object) -> SequenceStep:
    """Return the decode of a token at that position."""
    return replace(SequenceStep(1, (5,), start, (0,), True, SamplingParams(9), 0), **fields)  # type: ignore[arg-type]


def test_decodes_read_weights_once_and_every_key(runner: Runner) -> None:
    """At a slow memory a step takes its bytes: all weights but the embedding's, and what its sequences have seen."""
    config, model = runner.model_config, runner._model
    layer = model.layers[0]
    weights = num_bytes((model.layers, model.norm, model.head))
    roofline = Roofline(config, model, 1000.0, HardwarePeaks(bandwidth=1e6, flops=1e30))

    assert weights == config.num_layers * num_bytes(layer) + model.norm.nbytes + model.head.nbytes
    assert weights / 4 == pytest.approx(config.products_per_token, rel=0.02)  # norms beside the matrices
    assert roofline.least_seconds([decode(9), decode(29)]) == pytest.approx((weights + 40 * 1000) / 1e6)


def test_prompts_multiply_every_token_and_pair(runner: Runner) -> None:
    """At slow products a step takes those: matrices for each token, the head where one is sampled, and attention."""
    config = runner.model_config
    roofline = Roofline(config, runner._model, 1000.0, HardwarePeaks(bandwidth=1e30, flops=1e6))
    head = config.vocab_size * config.hidden_size
    pairs = 10 * 30 + 55
    operations = 2 * 10 * (config.products_per_token - head) + 2 * head
    operations += 4 * pairs * config.num_layers * config.num_heads * config.head_dim

    chunk = decode(30, token_ids=tuple(range(10)))

    assert roofline.least_seconds([chunk]) == pytest.approx(operations / 1e6)
    assert roofline.least_seconds([replace(chunk, samples=False)]) == pytest.approx((operations - 2 * head) / 1e6)


def test_windows_bound_what_is_read(runner: Runner) -> None:
    """A layer that looks back 16 tokens reads no more, however long the text is."""
    config = runner.model_config
    windowed = replace(config, windows=(16, *config.windows[1:]))
    full, less = (
        Roofline(some, runner._model, 1000.0, HardwarePeaks(bandwidth=1e6, flops=1e30)) for some in (config, windowed)
    )

    saved = full.least_seconds([decode(50)]) - less.least_seconds([decode(50)])

    assert saved == pytest.approx((51 - 16) * 1000 / config.num_layers / 1e6)


def test_experts_that_nothing_chooses_are_not_read(tmp_path: Path) -> None:
    """A token reads two of five, in the bytes that they have in mxfp4, and all that is whole."""
    tiny = TinyModel("GptOssForCausalLM", intermediate_size=64, packs_experts=True)
    folder = write_tiny_model(tmp_path, tiny)
    config = load_model_config(folder)
    model = load_model(config, Checkpoint(folder, torch.device("cpu"), torch.float32, None, config.packed), 64)
    roofline = Roofline(config, model, 0.0, HardwarePeaks(bandwidth=1.0, flops=1e30))
    experts = 5 * 3 * 64 * 64 * 17 // 32 * tiny.num_layers

    read = roofline.least_seconds([decode(9)])

    assert read == pytest.approx(num_bytes((model.layers, model.norm, model.head)) - experts * 3 / 5)


def test_states_are_read_and_written(tmp_path: Path) -> None:
    """Those of each sequence, beside the keys of the other layers."""
    folder = write_tiny_model(tmp_path, TinyModel("Qwen3_5ForCausalLM"))
    config = load_model_config(folder)
    model = load_model(config, Checkpoint(folder, torch.device("cpu"), torch.float32), 64)
    roofline = Roofline(config, model, 100.0, HardwarePeaks(bandwidth=1.0, flops=1e30))
    state = 4 * (4 * 8 * 12 + (2 * 2 * 8 + 4 * 12) * 3)

    more = roofline.least_seconds([decode(9), decode(9)]) - roofline.least_seconds([decode(9)])

    assert more == pytest.approx(2 * state + 10 * 100)


def test_ranks_multiply_with_their_own_experts_alone(tmp_path: Path) -> None:
    """Half of the experts are as many products as half of each."""
    folder = write_tiny_model(tmp_path, TinyModel("Qwen2MoeForCausalLM", num_experts=6))
    whole, peaks = load_model_config(folder), HardwarePeaks(bandwidth=1e30, flops=1e6)
    seconds = []
    for by_expert in (False, True):
        config = config_of_rank(whole, 2, by_expert)
        weights = shard(Checkpoint(folder, torch.device("cpu"), torch.float32), whole, 0, 2, by_expert)
        roofline = Roofline(config, load_model(config, weights, 64), 0.0, peaks)
        seconds.append(roofline.least_seconds([decode(0, token_ids=tuple(range(10)))]))

    assert seconds[1] == pytest.approx(seconds[0], rel=1e-6)


def test_every_step_tells_its_least_time_once_the_device_is_measured(runner: Runner) -> None:
    """Before the warm-up nothing is known; after it each step's time at best is more than none, and finite."""
    plan = StepPlan(1, (decode(0),))

    before = runner.run(plan).least_seconds
    runner.warm_up()
    after = runner.run(plan).least_seconds

    assert before == 0 < after < 1


def test_hardware_peaks_are_measured_on_the_spot() -> None:
    """A copy and a product of random numbers give two rates that no machine is without."""
    measured = measure_peaks(torch.device("cpu"), torch.float32, 1 << 20, 64, repeats=4)

    assert measured.bandwidth > 1e6 and measured.flops > 1e6 and measured.fp8_flops == 0
