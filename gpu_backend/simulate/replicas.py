# Several replicas and a trace: each request goes, when it arrives, to the replica with the least left to do.

from __future__ import annotations

import math
from collections.abc import Sequence

from gpu_backend.simulate.replica import NO_HOST_MEMORY, HostMemory, Replica
from gpu_backend.simulate.traces import TraceRequest
from gpu_backend.step.config import EngineConfig
from gpu_backend.step.cost import StepCost


def replay(
    requests: Sequence[TraceRequest],
    config: EngineConfig,
    cost: StepCost,
    num_blocks: int,
    replicas: int = 1,
    max_tokens: int = 2048,
    deadline_ms: int | None = None,
    host: HostMemory = NO_HOST_MEMORY,
) -> list[Replica]:
    """Serve all requests to their end and return the replicas with what they saw.

    ``max_tokens`` is what clients declare; the trace knows how long replies really get.
    """
    house = [Replica(config, cost, num_blocks, host) for _ in range(replicas)]
    for number, request in enumerate(requests):
        for replica in house:
            replica.run_until(request.arrival)
        min(house, key=lambda replica: replica.outstanding).submit(number, request, max_tokens, deadline_ms)
    for replica in house:
        replica.run_until(math.inf)
    return house
