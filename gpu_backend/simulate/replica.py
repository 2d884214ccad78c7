# One replica in virtual time: the real step loop over a runner that only lets the clock run. Requests go in when they
# arrive; what comes out is timed as a client would see it. Of several replicas each request goes to the one with the
# least left to do.

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gpu_backend.engine.loop import EngineLoop
from gpu_backend.kv_transfer.seam import KvTransfer
from gpu_backend.simulate.traces import TraceRequest
from gpu_backend.step.config import EngineConfig
from gpu_backend.step.cost import StepCost, plan_work
from gpu_backend.step.limits import Limits
from gpu_backend.step.messages import Event, FinishReason, Generate, NewTokens, Refused
from gpu_backend.step.plan import AtOnce, StepPlan, StepResult
from gpu_backend.step.sampling_params import SamplingParams
from gpu_backend.step.transfer import RemoteBlocks

LOOK_EVERY = 16  # steps between two looks at the counters of service
END = 0  # the token id that ends a reply
VOCABULARY = 2**31


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What each replica has behind its KV cache, and what a block's way there or back takes."""

    num_blocks: int = 0
    copy_seconds: float = 0.0
    swaps: bool = True  # False: it keeps what is evicted, and preempted sequences are computed again


NO_HOST_MEMORY = HostMemory()


@dataclass(slots=True)
class RequestOutcome:
    """What a client saw of one request. Seconds of the virtual clock."""

    request: TraceRequest
    first_token: float | None = None
    last_token: float = 0.0
    tokens: int = 0
    longest_gap: float = 0.0
    refused: str = ""  # why, if it was


@dataclass(slots=True)
class StepLog:
    """What the steps looked like; sums are weighted by the steps' seconds."""

    seconds: float = 0.0
    running_seconds: float = 0.0
    kv_seconds: float = 0.0
    computed_tokens: int = 0
    copying_seconds: float = 0.0  # of KV blocks to host memory and back
    most_blocks: int = 0  # in use at once
    most_gap: float = 0.0  # between the service of two that wait, as far as looked
    stretches: array[float] = field(default_factory=lambda: array("d"))  # step over its decodes alone, if it has both


class VirtualRunner(AtOnce):
    """Computes nothing: a step takes what ``cost`` predicts, and a reply ends at the length that its seed names."""

    def __init__(self, cost: StepCost, copy_seconds: float = 0.0) -> None:
        self.now = 0.0
        self.log = StepLog()
        self._cost = cost
        self._copy_seconds = copy_seconds

    def clock(self) -> float:
        """Return the virtual time in seconds."""
        return self.now

    def run(self, plan: StepPlan) -> StepResult:
        """Let the predicted time pass: that of the copies, which the device waits for, and then of the step."""
        work = plan_work(plan.sequences)
        copying = self._copy_seconds * len(plan.copies)
        seconds = copying + (self._cost.seconds(work) if plan.sequences else 0.0)
        decodes = [step for step in plan.sequences if step.samples and step.start >= step.num_prompt]
        if decodes and len(decodes) < len(plan.sequences):
            self.log.stretches.append((seconds - copying) / self._cost.seconds(plan_work(decodes)))
        self.now += seconds
        self.log.seconds += seconds
        self.log.copying_seconds += copying
        self.log.running_seconds += seconds * len(plan.sequences)
        self.log.computed_tokens += work.tokens
        tokens = tuple(
            END if step.start + len(step.token_ids) + 1 >= step.sampling.seed else 1
            for step in plan.sequences
            if step.samples
        )
        return StepResult(plan.step, tokens, seconds)


class Replica:
    """One engine of the simulated deployment."""

    def __init__(
        self,
        config: EngineConfig,
        cost: StepCost,
        num_blocks: int,
        host: HostMemory = NO_HOST_MEMORY,
        transfer: Callable[[VirtualRunner], KvTransfer] | None = None,
    ) -> None:
        self.runner = VirtualRunner(cost, host.copy_seconds)
        exchange = transfer(self.runner) if transfer is not None else None
        limits = Limits(
            max_model_len=num_blocks * config.cache.block_size,
            vocab_size=VOCABULARY,
            num_host_blocks=host.num_blocks,
            copy_seconds=host.copy_seconds if host.num_blocks and host.swaps else None,
        )
        self.loop = EngineLoop(config, self.runner, num_blocks, limits, self.runner.clock, transfer=exchange)
        self.gaps = array("d")  # seconds between two tokens of one reply
        self.outcomes: dict[str, RequestOutcome] = {}
        self._steps = 0
        self.outstanding = 0  # tokens of requests that have not ended

    def submit(
        self,
        number: int,
        request: TraceRequest,
        max_tokens: int,
        deadline_ms: int | None = None,
        marks: tuple[tuple[int, int], ...] = (),
        remote: RemoteBlocks | None = None,
    ) -> None:
        """Hand a request in, at the replica's own time; ``marks`` and ``remote``: as in ``Generate``."""
        outcome = RequestOutcome(request, last_token=request.arrival)
        self.outcomes[str(number)] = outcome
        self.outstanding += request.prompt_tokens + request.output_tokens
        sampling = SamplingParams(
            max_tokens=max(max_tokens, request.output_tokens),
            temperature=0.0,
            seed=request.prompt_tokens + request.output_tokens,
            stop_token_ids=frozenset({END}),
        )
        command = Generate(
            request_id=str(number),
            prompt_token_ids=request.prompt(number),
            sampling=sampling,
            tenant=request.tenant,
            weight=request.weight,
            tier=request.tier,
            deadline_ms=deadline_ms,
            prompt_marks=marks,
            remote=remote,
        )
        self._take(self.loop.handle(command))

    def run_until(self, time: float) -> None:
        """Step while there is work and ``time`` has not come; then it is at least that time."""
        while self.runner.now < time and self.loop.has_work():
            self.step()
        if self.runner.now < time < float("inf"):
            self.runner.now = time

    def step(self) -> None:
        """Take one step."""
        log, before = self.runner.log, self.runner.now
        self._take(self.loop.step())
        in_use = self.loop.blocks.num_in_use
        log.kv_seconds += (self.runner.now - before) * in_use / self.loop.blocks.num_blocks
        log.most_blocks = max(log.most_blocks, in_use)
        self._steps += 1
        if self._steps % LOOK_EVERY == 0:
            gaps = self.loop.scheduler.admission.service_gaps(self.loop.scheduler.running)
            log.most_gap = max(log.most_gap, gaps["service_gap_interactive"])

    def _take(self, events: Iterable[Event]) -> None:
        now = self.runner.now
        for event in events:
            if isinstance(event, Refused):
                outcome = self.outcomes[event.request_id]
                outcome.refused = event.reason
                self.outstanding -= outcome.request.prompt_tokens + outcome.request.output_tokens
            if not isinstance(event, NewTokens):
                continue
            outcome = self.outcomes[event.request_id]
            if event.finish_reason is not None:
                self.outstanding -= outcome.request.prompt_tokens + outcome.request.output_tokens
                if event.finish_reason is FinishReason.ERROR:
                    outcome.refused = event.error or "unknown"
                    continue
            if outcome.first_token is None:
                outcome.first_token = now
            else:
                gap = now - outcome.last_token
                self.gaps.append(gap)
                if gap > outcome.longest_gap:
                    outcome.longest_gap = gap
            outcome.last_token = now
            outcome.tokens += len(event.token_ids)


def replay(
    requests: Sequence[TraceRequest],
    config: EngineConfig,
    cost: StepCost,
    num_blocks: int,
    num_replicas: int = 1,
    max_tokens: int = 2048,
    deadline_ms: int | None = None,
    host: HostMemory = NO_HOST_MEMORY,
) -> list[Replica]:
    """Serve all requests to their end and return the replicas with what they saw.

    ``max_tokens`` is what clients declare; the trace knows how long replies really get.
    """
    replicas = [Replica(config, cost, num_blocks, host) for _ in range(num_replicas)]
    for number, request in enumerate(requests):
        for replica in replicas:
            replica.run_until(request.arrival)
        min(replicas, key=lambda replica: replica.outstanding).submit(number, request, max_tokens, deadline_ms)
    for replica in replicas:
        replica.run_until(math.inf)
    return replicas
