# Prompts computed elsewhere: what the tables of ``python -m tools.simulate.disaggregate`` rest on.

from __future__ import annotations

import pytest

from gpu_backend.simulate.replica import VirtualRunner
from gpu_backend.step.config import engine_config
from gpu_backend.step.cost import StepCost
from tools.simulate.disaggregate import ASKING, BLOCK, ELSEWHERE, Scene, VirtualTransfer, apart, together, workload

COST = StepCost(fixed=0.001, weights=0.01, token=2e-5, context=1e-9, pair=0.0)


def scene(link: float) -> Scene:
    """Replicas of 1,000 blocks of a kilobyte."""
    config = engine_config("", block_size=BLOCK, max_num_batched_tokens=4096, max_num_seqs=16, step_cost=COST)
    return Scene(config, COST, 1000, 1024.0, link)


def test_a_prompt_that_is_computed_elsewhere_comes_over_the_link() -> None:
    """Its first token waits for the prompt, the asking, its blocks' way and one step, and for nothing else."""
    (request,) = workload(2000, 5, 1.0, 1)
    blocks = (request.prompt_tokens - 1) // BLOCK
    (alone,) = together(scene(1e9), [request], 1)
    times = []
    for link in (1e9, 1024.0 * blocks):  # the second takes a second
        (outcome,) = apart(scene(link), [request], 1, 1, threshold=100)
        assert outcome.first_token is not None and alone.first_token is not None
        assert outcome.tokens == alone.tokens == request.output_tokens
        times.append(outcome.first_token - alone.first_token)

    step = COST.fixed + COST.weights
    assert times[0] == pytest.approx(ASKING + step, abs=0.5 * step)
    assert times[1] - times[0] == pytest.approx(1.0, abs=0.01)


def test_a_short_prompt_goes_nowhere_else() -> None:
    """Below the threshold a reply is that of one replica which does both."""
    requests = workload(200, 5, 2.0, 3)

    together_ = [outcome.first_token for outcome in together(scene(1e9), requests, 1)]
    assert [outcome.first_token for outcome in apart(scene(1e9), requests, 1, 1, threshold=1000)] == together_


def test_what_waits_for_the_link_lets_the_clock_run() -> None:
    """To wait is to come to the next event, and no further."""
    runner = VirtualRunner(COST)
    transfer = VirtualTransfer(runner, 1000.0, 1e6)
    transfer.describe(1, ELSEWHERE, b"", [b""])

    assert transfer.poll() == []
    assert len(transfer.poll(patience=5.0)) == 1
    assert runner.now == ASKING
