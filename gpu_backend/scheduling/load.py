# How busy the engine is: counters of what it did, and rates over the last ten seconds, for routers.

from __future__ import annotations

from collections import deque

from gpu_backend.kv_cache.blocks import BlockManager
from gpu_backend.scheduling.scheduler import Scheduler
from gpu_backend.step.messages import LoadReport
from gpu_backend.step.sequence import Status

WINDOW_SECONDS = 10.0


class LoadMeter:
    """Counts steps, tokens and finished requests; knows the rates of the recent past."""

    def __init__(self, started: float) -> None:
        self.steps = 0
        self.busy_seconds = 0.0
        self.least_seconds = 0.0  # of them: what the device could not have done without
        self.generated_tokens = 0
        self.computed_tokens = 0
        self.finished = 0
        # Time, generated tokens, finished, busy seconds, the least of them.
        self._marks: deque[tuple[float, int, int, float, float]] = deque([(started, 0, 0, 0.0, 0.0)])

    def count_step(
        self, computed_tokens: int, generated_tokens: int, seconds: float, least_seconds: float = 0.0
    ) -> None:
        """Record one step; ``least_seconds`` is what it could have taken at best."""
        self.steps += 1
        self.least_seconds += least_seconds
        self.busy_seconds += seconds
        self.computed_tokens += computed_tokens
        self.generated_tokens += generated_tokens

    def report(self, scheduler: Scheduler, blocks: BlockManager, now: float) -> LoadReport:
        """Describe the state at ``now``; rates reach back to the oldest report of the window."""
        while len(self._marks) > 1 and self._marks[1][0] <= now - WINDOW_SECONDS:
            self._marks.popleft()
        then, tokens, finished, busy, least = self._marks[0]
        elapsed = max(now - then, 1.0)
        self._marks.append((now, self.generated_tokens, self.finished, self.busy_seconds, self.least_seconds))
        recently_busy = self.busy_seconds - busy
        seen = scheduler.tables.prompt_tokens_seen
        return LoadReport(
            running_adapters=_adapters(scheduler, running=True),
            waiting_adapters=_adapters(scheduler, running=False),
            queue_depth=scheduler.num_waiting,
            running=len(scheduler.running),
            free_blocks=blocks.num_available,
            total_blocks=blocks.num_blocks,
            kv_utilization=blocks.num_in_use / blocks.num_blocks,
            tokens_per_second=(self.generated_tokens - tokens) / elapsed,
            requests_per_second=(self.finished - finished) / elapsed,
            prefix_hit_rate=scheduler.tables.prompt_tokens_found / seen if seen else 0.0,
            steps=self.steps,
            gpu_busy_seconds=self.busy_seconds,
            roofline_share=(self.least_seconds - least) / recently_busy if recently_busy else 0.0,
            counters={
                "generated_tokens": float(self.generated_tokens),
                "computed_tokens": float(self.computed_tokens),
                "least_seconds": self.least_seconds,
                "finished": float(self.finished),
                "preemptions": float(scheduler.running.num_preempted),
                "made_room": float(scheduler.admission.num_preempted_for_starved),
                "swaps": float(scheduler.running.num_swapped),
                "prompt_tokens": float(seen),
                "cached_prompt_tokens": float(scheduler.tables.prompt_tokens_found),
                **scheduler.admission.service_gaps(scheduler.running),
                **(scheduler.speculator.counters() if scheduler.speculator else {}),
            },
        )


def _adapters(scheduler: Scheduler, *, running: bool) -> tuple[str, ...]:
    """Return the names of the adapters of replies that run, or of those that wait."""
    replies = [reply for reply in scheduler.replies if (reply.status is Status.RUNNING) == running]
    return tuple(sorted({reply.request.adapter.name for reply in replies if reply.request.adapter is not None}))
