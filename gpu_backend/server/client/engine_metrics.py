# The engine's own state as Prometheus reads it, from the last load report, at each scrape.

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gpu_backend.scheduling.admission import TIERS
from gpu_backend.server.client.engine_client import EngineClient, EngineState
from gpu_backend.step.config import MOST_SPECULATIVE_TOKENS
from gpu_backend.step.messages import LoadReport, Ready

LABELS = ("model_name",)
GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily
# What a load report says, by its fields or its counters: those that it has none of are not shown.
OF_LOAD = (
    (GAUGE, "vllm:num_requests_running", "running", "Replies in the running batch."),
    (GAUGE, "vllm:num_requests_waiting", "queue_depth", "Replies waiting for room in the batch."),
    (GAUGE, "vllm:kv_cache_usage_perc", "kv_utilization", "KV blocks in use over all, 0 to 1."),
    (GAUGE, "tollgate_engine_free_blocks", "free_blocks", "KV blocks free or evictable."),
    (GAUGE, "tollgate_engine_blocks", "total_blocks", "KV blocks in all."),
    (GAUGE, "tollgate_engine_tokens_per_second", "tokens_per_second", "Output, last ten seconds."),
    (COUNTER, "tollgate_engine_steps", "steps", "Steps computed."),
    (COUNTER, "tollgate_engine_least_seconds", "least_seconds", "What all steps could have taken at best."),
    (
        *(GAUGE, "tollgate_engine_roofline_share", "roofline_share"),
        "Of the device's busy time, last ten seconds: what reading and multiplying take at its measured best.",
    ),
    (COUNTER, "vllm:num_preemptions", "preemptions", "Replies that lost their blocks."),
    (COUNTER, "tollgate_engine_made_room", "made_room", "Of these, for a tenant that held less and had waited."),
    (COUNTER, "tollgate_engine_swaps", "swaps", "Of these, copied to host memory."),
    (GAUGE, "tollgate_engine_kv_blocks_held", "kv_blocks_held", "KV blocks held for other engines now."),
    (
        *(GAUGE, "tollgate_engine_kv_pulls_waiting", "kv_pulls_waiting"),
        "Prompts whose KV blocks are awaited from other engines now.",
    ),
    (COUNTER, "tollgate_engine_kv_blocks_offered", "kv_blocks_offered", "KV blocks that were held for other engines."),
    (COUNTER, "tollgate_engine_kv_blocks_pulled", "kv_blocks_pulled", "KV blocks that came from other engines."),
    (COUNTER, "tollgate_engine_kv_blocks_shared", "kv_blocks_shared", "Of these, through shared memory."),
    (COUNTER, "tollgate_engine_kv_pulls", "kv_pulls", "Prompts whose KV blocks were asked of another engine."),
    (
        *(COUNTER, "tollgate_engine_kv_pulls_failed", "kv_pulls_failed"),
        "Of these, those that not all came of: the rest was computed.",
    ),
    (COUNTER, "vllm:spec_decode_num_drafts", "drafts", "Times that a reply's drafts were verified."),
    (COUNTER, "vllm:spec_decode_num_draft_tokens", "draft_tokens", "Draft tokens."),
    (COUNTER, "vllm:spec_decode_num_accepted_tokens", "accepted_tokens", "Draft tokens that held."),
)


class EngineCollector:
    """Reads the last load report when Prometheus asks.

    ``gpus`` compute each step together; the device has room for ``max_loras`` adapters.
    """

    def __init__(self, model_name: str, engine: EngineClient, gpus: int = 1, max_loras: int = 0) -> None:
        self._model_name = model_name
        self._engine = engine
        self._gpus = gpus
        self._max_loras = max_loras
        self._since = time.time()

    def collect(self) -> Iterable[Metric]:
        engine = self._engine
        busy, uptime = engine.busy_seconds, engine.uptime_seconds
        is_asleep = engine.state is EngineState.SLEEPING
        is_up = is_asleep or engine.state is EngineState.ACTIVE
        states = {("awake",): float(not is_asleep), ("weights_offloaded",): float(is_asleep)}
        for kind, name, text, value in (
            (GAUGE, "tollgate_engine_up", "Whether the engine takes requests, or sleeps.", float(is_up)),
            (COUNTER, "tollgate_engine_restarts", "Engine processes started after one died.", engine.restarts),
            (COUNTER, "tollgate_engine_uptime_seconds", "Time since the start.", uptime),
            (COUNTER, "tollgate_engine_gpu_busy_seconds", "Device time of all steps, all devices.", busy * self._gpus),
            (
                COUNTER,
                "tollgate_engine_gpu_idle_seconds",
                "Device time without a step.",
                max(uptime - busy, 0.0) * self._gpus,
            ),
        ):
            yield self._family(kind, name, text, {(): value})
        yield self._family(GAUGE, "vllm:engine_sleep_state", "1 for the state it is in.", states, "sleep_state")
        if engine.ready is not None:
            yield from self._capacity(engine.load, engine.ready)
        if engine.load is not None:
            yield from self._load(engine.load)

    def _capacity(self, load: LoadReport | None, ready: Ready) -> Iterable[Metric]:
        """What routers read of each engine, under vLLM's names: its blocks, and its adapters."""
        blocks = {"block_size": str(ready.block_size), "num_gpu_blocks": str(ready.total_blocks)}
        adapters = {
            "max_lora": str(self._max_loras),
            "running_lora_adapters": ",".join(load.running_adapters if load else ()),
            "waiting_lora_adapters": ",".join(load.waiting_adapters if load else ()),
        }
        for name, text, labels, value in (
            ("vllm:cache_config_info", "Tokens in a KV block, and blocks in all.", blocks, 1.0),
            (
                "vllm:lora_requests_info",
                "Adapters in use; the value is when this engine started.",
                adapters,
                self._since,
            ),
        ):
            yield self._family(GAUGE, name, text, {tuple(labels.values()): value}, *labels)

    def _load(self, load: LoadReport) -> Iterable[Metric]:
        counters = load.counters
        for kind, name, source, text in OF_LOAD:
            if (value := counters.get(source, getattr(load, source, None))) is not None:
                yield self._family(kind, name, text, {(): value})
        places = map(str, range(MOST_SPECULATIVE_TOKENS))
        if held := {(n,): counters[f"accepted_tokens_at_{n}"] for n in places if f"accepted_tokens_at_{n}" in counters}:
            name, text = "vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens that held, by their place."
            yield self._family(COUNTER, name, text, held, "position")
        for name, text in (
            ("service_gap", "How far the counters of waiting tenants lie apart: weighted tokens, a reply's twice."),
            ("service_bound", "How far they can, by the requests seen so far; see docs/fairness.md."),
        ):
            by_tier = {(tier,): counters.get(f"{name}_{tier}", 0.0) for tier in TIERS}
            yield self._family(GAUGE, f"tollgate_engine_{name}", text, by_tier, "tier")

    def _family(self, kind: Callable[..., Any], name: str, text: str, values: dict[Any, float], *labels: str) -> Metric:
        """Return a metric with these values, by those of the further ``labels``."""
        family = kind(name, text, labels=(*LABELS, *labels))
        for own, value in values.items():
            family.add_metric([self._model_name, *own], value)
        return family
