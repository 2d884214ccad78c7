# How busy an engine is, as its GET /load says: gateways add up its seconds, and send it what it has room for.

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from protocol.serving.announcements import KvEventsAt

Name = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[^\x00]*\Z")]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Number = Annotated[float, Meta(ge=0, le=1e15)]
Seconds = Annotated[float, Meta(ge=0, le=400 * 86_400)]  # no replica is older than that
StepSeconds = Annotated[float, Meta(ge=0, le=3600)]


class Fairness(Struct, frozen=True):
    """How far the counters of a tier's waiting tenants lie apart, in weighted tokens, and how far they can."""

    gap: Number = 0
    bound: Number = 0


class StepCost(Struct, frozen=True):
    """What a step of an engine takes, in seconds, as it was measured or told; docs/simulator.md has the formula."""

    fixed: StepSeconds
    weights: StepSeconds
    token: StepSeconds
    context: StepSeconds
    pair: StepSeconds = 0.0
    launching: StepSeconds = 0.0


class EngineLoad(Struct, frozen=True, kw_only=True):
    """What a router wants to know before it sends a request there, and what an accountant adds up.

    The seconds are counters: of this start alone, which is why every start has an ``instance_id`` of its own. Fields
    that are missing are 0.
    """

    instance_id: Name
    model_id: Name
    status: Name = "active"
    queue_depth: Count = 0
    running: Count = 0
    free_blocks: Count = 0
    total_blocks: Count = 0
    kv_utilization: Number = 0
    tokens_per_second: Number = 0
    requests_per_second: Number = 0
    prefix_hit_rate: Number = 0
    gpu_node_id: Name | None = None
    gpus: Annotated[int, Meta(ge=1, le=1024)] = 1  # devices that the engine computes on; the CPU counts as one
    uptime_seconds: Seconds = 0  # since the start, the loading of the weights included
    busy_seconds: Seconds = 0  # of these, in steps
    request_seconds: Seconds = 0  # of these, told in the usage of answers; the rest served no request to its end
    max_running: Count = 0  # replies at once
    input_modalities: tuple[Name, ...] = ()  # text, and image where it reads pictures; engines of before say nothing
    abilities: tuple[Name, ...] = ()  # beside chats: tools, vision; engines of before say nothing
    kv_transfer: bool = True  # whether it reads blocks that another computed; engines of before say nothing of it
    adapters: tuple[Name, ...] = ()  # of the model, by name
    kv_events: KvEventsAt | None = None  # where it tells what its prefix cache gains and loses, if it does
    roofline_share: Number | None = None  # of the busy time of ten seconds: what reading and multiplying take at best
    fairness: Annotated[dict[Name, Fairness], Meta(max_length=8)] = {}  # by tier; docs/fairness.md
    step_cost: StepCost | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What the catalogue may ask for: the model, and its adapters."""
        return self.model_id, *self.adapters
