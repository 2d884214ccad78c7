# The engine's own state as Prometheus reads it, from the last load report, at each scrape.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gpu_backend.scheduling.admission import TIERS
from gpu_backend.step.config import MOST_SPECULATIVE_TOKENS
from gpu_backend.step.messages import LoadReport, Ready

LABELS = ("model_name",)


@dataclass(frozen=True, slots=True)
class EngineReading:
    """The engine's state at one moment, as the metrics show it."""

    load: LoadReport | None  # None until the engine has reported
    is_up: bool
    restarts: int
    uptime_seconds: float = 0.0
    busy_seconds: float = 0.0  # of these, in steps
    gpus: int = 1  # devices that compute each step together
    ready: Ready | None = None  # None until the engine is
    since: float = 0.0  # unix seconds of this start
    max_loras: int = 0  # adapters that the device has room for
    is_asleep: bool = False


class EngineCollector:
    """Reads the last load report when Prometheus asks."""

    def __init__(self, model_name: str, current: Callable[[], EngineReading]) -> None:
        self._model_name = model_name
        self._current = current

    def collect(self) -> Iterable[Metric]:
        reading = self._current()
        yield self._gauge("tollgate_engine_up", "Whether the engine takes requests, or sleeps.", float(reading.is_up))
        yield self._sleep_state(reading.is_asleep)
        yield self._count("tollgate_engine_restarts", "Engine processes started after one died.", reading.restarts)
        yield self._count("tollgate_engine_uptime_seconds", "Time since the start.", reading.uptime_seconds)
        busy, whole = reading.busy_seconds * reading.gpus, reading.uptime_seconds * reading.gpus
        yield self._count("tollgate_engine_gpu_busy_seconds", "Device time of all steps, all devices.", busy)
        yield self._count("tollgate_engine_gpu_idle_seconds", "Device time without a step.", max(whole - busy, 0.0))
        if reading.ready is not None:
            yield from self._capacity(reading, reading.ready)
        load = reading.load
        if load is None:
            return
        yield self._gauge("vllm:num_requests_running", "Replies in the running batch.", load.running)
        yield self._gauge("vllm:num_requests_waiting", "Replies waiting for room in the batch.", load.queue_depth)
        yield self._gauge("vllm:kv_cache_usage_perc", "KV blocks in use over all, 0 to 1.", load.kv_utilization)
        yield self._gauge("tollgate_engine_free_blocks", "KV blocks free or evictable.", load.free_blocks)
        yield self._gauge("tollgate_engine_blocks", "KV blocks in all.", load.total_blocks)
        yield self._gauge("tollgate_engine_tokens_per_second", "Output, last ten seconds.", load.tokens_per_second)
        yield self._count("tollgate_engine_steps", "Steps computed.", load.steps)
        least = load.counters.get("least_seconds", 0.0)
        yield self._count("tollgate_engine_least_seconds", "What all steps could have taken at best.", least)
        yield self._gauge(
            "tollgate_engine_roofline_share",
            "Of the device's busy time, last ten seconds: what reading and multiplying take at its measured best.",
            load.roofline_share,
        )
        yield self._count(
            "vllm:num_preemptions", "Replies that lost their blocks.", load.counters.get("preemptions", 0.0)
        )
        made_room = load.counters.get("made_room", 0.0)
        yield self._count(
            "tollgate_engine_made_room", "Of these, for a tenant that held less and had waited.", made_room
        )
        yield self._count("tollgate_engine_swaps", "Of these, copied to host memory.", load.counters.get("swaps", 0.0))
        if "kv_pulls" in load.counters:
            yield from self._transfers(load.counters)
        if "drafts" in load.counters:
            yield from self._speculation(load.counters)

        for name, text in (
            ("service_gap", "How far the counters of waiting tenants lie apart: weighted tokens, a reply's twice."),
            ("service_bound", "How far they can, by the requests seen so far; see docs/fairness.md."),
        ):
            gauge = GaugeMetricFamily(f"tollgate_engine_{name}", text, labels=(*LABELS, "tier"))
            for tier in TIERS:
                gauge.add_metric([self._model_name, tier], load.counters.get(f"{name}_{tier}", 0.0))
            yield gauge

    def _capacity(self, reading: EngineReading, ready: Ready) -> Iterable[Metric]:
        """What routers read of each engine, under vLLM's names: its blocks, and its adapters."""
        blocks = {"block_size": str(ready.block_size), "num_gpu_blocks": str(ready.total_blocks)}
        load = reading.load
        adapters = {
            "max_lora": str(reading.max_loras),
            "running_lora_adapters": ",".join(load.running_adapters if load else ()),
            "waiting_lora_adapters": ",".join(load.waiting_adapters if load else ()),
        }
        for name, text, labels, value in (
            ("cache_config", "Tokens in a KV block, and blocks in all.", blocks, 1.0),
            ("lora_requests", "Adapters in use; the value is when this engine started.", adapters, reading.since),
        ):
            family = GaugeMetricFamily(f"vllm:{name}_info", text, labels=(*LABELS, *labels))
            family.add_metric([self._model_name, *labels.values()], value)
            yield family

    def _sleep_state(self, is_asleep: bool) -> Metric:
        family = GaugeMetricFamily(
            "vllm:engine_sleep_state", "1 for the state it is in.", labels=(*LABELS, "sleep_state")
        )
        for state, is_so in (("awake", not is_asleep), ("weights_offloaded", is_asleep)):
            family.add_metric([self._model_name, state], float(is_so))
        return family

    def _transfers(self, counters: Mapping[str, float]) -> Iterable[Metric]:
        for name, text in (
            ("kv_blocks_held", "KV blocks held for other engines now."),
            ("kv_pulls_waiting", "Prompts whose KV blocks are awaited from other engines now."),
        ):
            yield self._gauge(f"tollgate_engine_{name}", text, counters[name])
        for name, text in (
            ("kv_blocks_offered", "KV blocks that were held for other engines."),
            ("kv_blocks_pulled", "KV blocks that came from other engines."),
            ("kv_pulls", "Prompts whose KV blocks were asked of another engine."),
            ("kv_pulls_failed", "Of these, those that not all came of: the rest was computed."),
        ):
            yield self._count(f"tollgate_engine_{name}", text, counters[name])

    def _speculation(self, counters: Mapping[str, float]) -> Iterable[Metric]:
        for name, text in (
            ("drafts", "Times that a reply's drafts were verified."),
            ("draft_tokens", "Draft tokens."),
            ("accepted_tokens", "Draft tokens that held."),
        ):
            yield self._count(f"vllm:spec_decode_num_{name}", text, counters[name])
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that held, by their place.",
            labels=(*LABELS, "position"),
        )
        for place in range(MOST_SPECULATIVE_TOKENS):
            if (held := counters.get(f"accepted_tokens_at_{place}")) is not None:
                family.add_metric([self._model_name, str(place)], held)
        yield family

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help, labels=LABELS)
        family.add_metric([self._model_name], value)
        return family

    def _count(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(name, help, labels=LABELS)
        family.add_metric([self._model_name], value)
        return family
