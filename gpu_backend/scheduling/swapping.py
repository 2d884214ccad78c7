# What becomes of a preempted sequence: its blocks are copied to host memory, or its tokens computed again when it
# comes back, whichever is predicted to take less of the device's time.

from __future__ import annotations

from gpu_backend.step.cost import StepCost, StepWork, chunk_work

LEARNT_EVERY = 16  # steps
MEMORY = 0.9  # how much of what was learnt counts after the next step


class SwapChoice:
    """Compares copies, of which one block's takes ``copy_seconds``, with the steps that ``cost`` predicts.

    Where ``is_measured`` is false only the proportions of ``cost`` are right, and its unit is learnt from steps.
    Without ``copy_seconds`` nothing is ever copied.
    """

    def __init__(self, cost: StepCost, is_measured: bool, copy_seconds: float | None) -> None:
        self._cost = cost
        self._unit = 1.0 if is_measured else 0.0  # seconds; 0: not known yet
        self._learns = not is_measured and copy_seconds is not None
        self._copy_seconds = copy_seconds

    def wants(self, step: int) -> bool:
        """Whether something is to be learnt from a step of that number."""
        return self._learns and step % LEARNT_EVERY == 0

    def learn(self, work: StepWork, seconds: float) -> None:
        """Take note of what a step took."""
        found = seconds / self._cost.seconds(work)
        self._unit = MEMORY * self._unit + (1 - MEMORY) * found if self._unit else found

    def pays(self, running: StepWork, num_tokens: int, num_blocks: int) -> bool:
        """Whether copying blocks out and in again takes less than computing their tokens beside what is running."""
        if self._copy_seconds is None:
            return False
        longer = self._cost.seconds(running + chunk_work(0, num_tokens)) - self._cost.seconds(running)
        return 2 * num_blocks * self._copy_seconds < self._unit * longer
