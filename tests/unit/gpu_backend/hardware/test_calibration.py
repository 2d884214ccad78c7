# A step's cost measured on the spot: steps of a virtual clock tell the five numbers that it runs on.

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_backend.hardware.calibration import measure_step_cost
from gpu_backend.scheduling.budget import StepBudget
from gpu_backend.simulate.hardware import DEVICES, MODELS, step_cost
from gpu_backend.simulate.replica import VirtualRunner
from gpu_backend.step.config import StepConfig
from gpu_backend.step.cost import StepCost, StepWork, chunk_work, plan_work, read_step_cost
from gpu_backend.step.messages import Generate
from gpu_backend.step.plan import SequenceStep
from gpu_backend.step.sampling_params import SamplingParams
from gpu_backend.step.sequence import ReplyTimes, Sequence

COSTS = {
    "a large model on a GPU": step_cost(MODELS["llama-8b"], DEVICES["h200"]),
    "a CPU": StepCost(fixed=0.004, weights=0.0, token=0.0012, context=2e-6, pair=1e-7),
    "a small model whose decodes are graphs": StepCost(0.0003, 0.0004, 2e-6, 4e-9, 1e-10, launching=0.0038),
    "no attention to speak of": StepCost(fixed=0.01, weights=0.0, token=0.0, context=0.0, pair=0.0),
}
WORKS = {
    "one decode": StepWork(1, 300, 300),
    "many decodes": StepWork(24, 24 * 900, 24 * 900),
    "a prompt among decodes": StepWork(24, 24 * 900, 24 * 900) + chunk_work(0, 200),
    "a prompt": chunk_work(0, 200),
    "a chunk deep in a prompt": chunk_work(3000, 128),
}


@pytest.mark.parametrize("name", COSTS)
def test_measured_cost_predicts_what_it_was_measured_on(name: str) -> None:
    """Within a few percent, for steps of sizes that were not among the measured ones."""
    found = measure_step_cost(VirtualRunner(COSTS[name]).run, 1000, 16, 256, 2048)

    for work in WORKS.values():
        assert found.seconds(work) == pytest.approx(COSTS[name].seconds(work), rel=0.05)


def test_a_prompt_stretches_what_its_decodes_take_beside_prompts() -> None:
    """A step with prompts in it is launched whatever is in it; that is no reason to compute no more than a block."""
    cost = COSTS["a small model whose decodes are graphs"]
    asked = SamplingParams(max_tokens=9)
    decodes = tuple(SequenceStep(row, (0,), 900, (0,), True, asked, 0, row=row) for row in range(24))
    budget = StepBudget(StepConfig(step_cost=cost), 16, decodes)
    prompt = Sequence(99, Generate("prompt", (1,) * 5000, asked), asked, 6000, ReplyTimes(0.0))
    taken = budget.take(prompt)
    alone, beside = cost.seconds_launched(plan_work(decodes)), plan_work(decodes) + chunk_work(0, taken)

    assert cost.seconds(beside) <= 1.5 * alone < cost.seconds(beside + StepWork(tokens=16))
    assert taken > 800


def test_small_cache_is_not_overrun() -> None:
    """Every block of every measured step is there, and no step has more tokens or rows than it may."""
    runner, most = VirtualRunner(COSTS["a CPU"]), [0, 0, 0]

    def run(plan: object) -> object:
        for step in plan.sequences:  # type: ignore[attr-defined]
            most[0] = max(most[0], *step.block_table)
            assert step.start + len(step.token_ids) <= 3 * 16
        most[1] = max(most[1], len(plan.sequences))  # type: ignore[attr-defined]
        most[2] = max(most[2], plan.num_tokens)  # type: ignore[attr-defined]
        return runner.run(plan)  # type: ignore[arg-type]

    measure_step_cost(run, 3, 16, 4, 20)  # type: ignore[arg-type]

    assert most == [2, 2, 16]


def test_a_cost_that_is_told_is_one_that_gateways_read(tmp_path: Path) -> None:
    """They take a report with another for none, and the replica for one that does not answer."""
    told = tmp_path / "cost.json"

    def read(token: str) -> StepCost:
        told.write_text(f'{{"fixed": 0.1, "weights": 0, "token": {token}, "context": 0, "pair": 0}}')
        return read_step_cost(told)

    assert read("3600") == StepCost(0.1, 0, 3600, 0, 0)
    for token in ("Infinity", "NaN", "-1e-9", "3601", '"1"'):
        with pytest.raises(ValueError, match="no number from 0 to 3600"):
            read(token)
