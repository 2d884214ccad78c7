# What scheduling costs the host: microseconds a step for 256 running replies, the device's work left out.
# python -m benchmarks.scheduler

from __future__ import annotations

import statistics
import time

from gpu_backend.engine.loop import EngineLoop
from gpu_backend.step.config import engine_config
from gpu_backend.step.limits import Limits
from gpu_backend.step.messages import Generate
from gpu_backend.step.plan import AtOnce, StepPlan, StepResult
from gpu_backend.step.sampling_params import SamplingParams

SEQUENCES = 256
PROMPT = 512
STEPS = 400


class NoDevice(AtOnce):
    """Answers every step at once with the same token."""

    def run(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, (1,) * sum(step.samples for step in plan.sequences), 0.01)


def measure(num_waiting: int, num_tenants: int) -> tuple[float, float]:
    """Return the median CPU microseconds of ``schedule`` and of a whole step, with that many requests waiting."""
    config = engine_config("", max_num_seqs=SEQUENCES, max_num_batched_tokens=8192)
    loop = EngineLoop(config, NoDevice(), 60_000, Limits(32_768, 1000))
    for number in range(SEQUENCES + num_waiting):
        prompt = tuple((number * 31 + i) % 997 for i in range(PROMPT))
        sampling = SamplingParams(max_tokens=4096, ignore_eos=True)
        loop.handle(Generate(f"r{number}", prompt, sampling, tenant=f"tenant {number % num_tenants}"))
    scheduling, whole = [], []
    schedule = loop.scheduler.schedule

    def timed(may_preempt: bool = True) -> StepPlan | None:
        before = time.thread_time()
        plan = schedule(may_preempt)
        scheduling.append(time.thread_time() - before)
        return plan

    loop.scheduler.schedule = timed  # type: ignore[method-assign]
    for _ in range(STEPS):
        before = time.thread_time()
        loop.step()
        whole.append(time.thread_time() - before)
    settled = STEPS // 4  # the prompts are computed by then
    return statistics.median(scheduling[settled:]) * 1e6, statistics.median(whole[settled:]) * 1e6


def main() -> None:
    """Print a table."""
    print("waiting | tenants | schedule, µs | whole step, µs")
    for num_waiting, num_tenants in ((0, 1), (0, 64), (1000, 1), (1000, 64)):
        schedule, whole = measure(num_waiting, num_tenants)
        print(f"{num_waiting:7} | {num_tenants:7} | {schedule:12.0f} | {whole:14.0f}")


if __name__ == "__main__":
    main()
