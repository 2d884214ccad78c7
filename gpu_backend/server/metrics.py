# What Prometheus reads. Names are vLLM's where the meaning is the same, so that dashboards made for it work here; the
# rest begin with ``tollgate_engine_``.

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from gpu_backend.server.client.engine_client import EngineClient
from gpu_backend.server.client.engine_metrics import LABELS, EngineCollector
from gpu_backend.server.wire import UsageBody

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5)
STEPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 64, 128, 256, 512)
TENANT_LABELS = (*LABELS, "tenant")
MOST_TENANTS = 100  # with series of their own; what comes from more is counted together
OTHER_TENANTS = "(others)"
COUNTERS = {
    "prompt_tokens": ("vllm:prompt_tokens", "Prompt tokens of answered requests."),
    "cached_tokens": ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "queried_tokens": ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "generation_tokens": ("vllm:generation_tokens", "Tokens generated for answered requests."),
    "gpu_seconds": (
        "tollgate_engine_request_gpu_seconds",
        "Device time of answered requests: their parts of the steps, all devices together.",
    ),
}
HISTOGRAMS = {
    "first_token": ("vllm:time_to_first_token_seconds", "From arrival to the first token."),
    "latency": ("vllm:e2e_request_latency_seconds", "From arrival to the last token."),
    "queue": ("vllm:request_queue_time_seconds", "Waiting for the first step."),
    "prefill": ("vllm:request_prefill_time_seconds", "From the first step to the first token."),
    "decode": ("vllm:request_decode_time_seconds", "From the first token to the last."),
    "inference": ("vllm:request_inference_time_seconds", "From the first step to the last token."),
    "gap": ("vllm:inter_token_latency_seconds", "Between a reply's tokens that came one after the other."),
    "token": ("vllm:request_time_per_output_token_seconds", "The mean of a request's tokens after the first."),
}
LENGTHS = {
    "prompt_length": ("vllm:request_prompt_tokens", "Prompt tokens of a request."),
    "reply_length": ("vllm:request_generation_tokens", "Tokens of a request's replies, all together."),
}


class Metrics:
    """Counts what is answered, by tenant; the ``engine``'s own state is read at each scrape, by ``EngineCollector``."""

    def __init__(self, model_name: str, engine: EngineClient, gpus: int = 1, max_loras: int = 0) -> None:
        disable_created_metrics()  # a second series for each, which is not read
        self.registry = CollectorRegistry()
        self.request_seconds = 0.0  # device time that answers told in their usage
        self.answered = 0  # calls that came to their end,
        self.failed = 0  # and those that the engine itself could not finish
        self._model_name = model_name
        ProcessCollector(registry=self.registry)
        self.registry.register(EngineCollector(model_name, engine, gpus, max_loras))
        self._counters = {
            field: Counter(name, text, TENANT_LABELS, registry=self.registry)
            for field, (name, text) in COUNTERS.items()
        }
        self._histograms = {
            field: Histogram(name, text, TENANT_LABELS, buckets=SECONDS, registry=self.registry)
            for field, (name, text) in HISTOGRAMS.items()
        }
        self._histograms |= {
            field: Histogram(name, text, TENANT_LABELS, buckets=TOKENS, registry=self.registry)
            for field, (name, text) in LENGTHS.items()
        }
        self._finished = Counter(
            "vllm:request_success",
            "Replies by how they ended.",
            (*TENANT_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._first_token_steps = Histogram(
            "tollgate_engine_first_token_steps",
            "Steps that the engine computed from a request's arrival to its first token.",
            (*LABELS, "tier"),
            buckets=STEPS,
            registry=self.registry,
        )
        self._refused = Counter(
            "tollgate_engine_refused", "Requests refused, by status.", (*LABELS, "status"), registry=self.registry
        )
        self._tenants: dict[str, _Tenant] = {}
        self._of("")

    def count_generation(
        self,
        usage: UsageBody,
        finish_reasons: Iterable[str],
        *,
        time_to_first_token: float,
        latency: float,
        tier: str,
        tenant: str = "",
    ) -> None:
        """Record a generating call that was answered to its end. Times are seconds."""
        assert isinstance(usage.completion_tokens, int)
        own, finish_reasons = self._of(tenant), list(finish_reasons)
        own.counters["generation_tokens"].inc(usage.completion_tokens)
        own.histograms["first_token"].observe(time_to_first_token)
        self._first_token_steps.labels(self._model_name, tier).observe(usage.first_token_steps)
        own.histograms["decode"].observe(usage.decode_ms / 1000)
        own.histograms["inference"].observe((usage.prefill_ms + usage.decode_ms) / 1000)
        own.histograms["reply_length"].observe(usage.completion_tokens)
        if (after_first := usage.completion_tokens - len(finish_reasons)) > 0:
            own.histograms["token"].observe(usage.decode_ms / 1000 * len(finish_reasons) / after_first)
        for reason in finish_reasons:
            self._finished.labels(self._model_name, own.name, reason).inc()
        self._count_call(own, usage, latency)

    def gaps_of(self, tenant: str) -> Histogram:
        """Return where the seconds between a tenant's tokens are counted."""
        return self._of(tenant).histograms["gap"]

    def count_given_up(self, num_replies: int, tenant: str = "") -> None:
        """Record replies whose client left, or that failed, before their end."""
        if num_replies:
            self._finished.labels(self._model_name, self._of(tenant).name, "abort").inc(num_replies)

    def count_embeddings(self, usage: UsageBody, num_inputs: int, *, latency: float, tenant: str = "") -> None:
        """Record an embedding call that was answered."""
        own = self._of(tenant)
        self._finished.labels(self._model_name, own.name, "stop").inc(num_inputs)
        self._count_call(own, usage, latency)

    def count_refusal(self, status: int) -> None:
        """Record a request that got an error instead of an answer."""
        self._refused.labels(self._model_name, str(status)).inc()
        self.count_failure(status)

    def count_failure(self, status: int) -> None:
        """Record what went wrong, before or after the first byte of an answer, if it is the engine's own fault."""
        self.failed += status == 500

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _count_call(self, own: _Tenant, usage: UsageBody, latency: float) -> None:
        self.answered += 1
        own.counters["prompt_tokens"].inc(usage.prompt_tokens)
        own.counters["queried_tokens"].inc(usage.prompt_tokens)
        own.counters["cached_tokens"].inc(usage.cached_tokens)
        self.request_seconds += usage.gpu_seconds
        own.counters["gpu_seconds"].inc(usage.gpu_seconds)
        own.histograms["prompt_length"].observe(usage.prompt_tokens)
        own.histograms["latency"].observe(latency)
        own.histograms["queue"].observe(usage.queue_ms / 1000)
        own.histograms["prefill"].observe(usage.prefill_ms / 1000)

    def _of(self, tenant: str) -> _Tenant:
        """Return a tenant's own series; those that come late, when there are many, share one."""
        found = self._tenants.get(tenant)
        if found is None:
            name = tenant if len(self._tenants) < MOST_TENANTS else OTHER_TENANTS
            labels = self._model_name, name
            found = self._tenants.get(name) or _Tenant(
                name,
                {field: counter.labels(*labels) for field, counter in self._counters.items()},
                {field: histogram.labels(*labels) for field, histogram in self._histograms.items()},
            )
            self._tenants[name] = found
        return found


@dataclass(frozen=True, slots=True)
class _Tenant:
    """One tenant's series, by the names of ``COUNTERS``, ``HISTOGRAMS`` and ``LENGTHS``."""

    name: str
    counters: Mapping[str, Counter]
    histograms: Mapping[str, Histogram]
