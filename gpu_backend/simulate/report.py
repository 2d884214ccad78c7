# What a simulation came to, as numbers and as text.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from gpu_backend.simulate.replica import Replica, RequestOutcome


@dataclass(frozen=True, slots=True)
class Promise:
    """What counts as good service: seconds to the first token, and the longest pause between two."""

    first_token: float = 1.0
    gap: float = 0.2


@dataclass(frozen=True, slots=True)
class Report:
    """A simulation's figures. Times are seconds; shares lie between 0 and 1."""

    requests: int
    refused: int
    seconds: float  # from the first arrival to the last token
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    gap_p50: float
    gap_p90: float
    gap_p99: float
    output_tokens_per_second: float
    goodput: float  # requests a second that got what was promised
    goodput_share: float  # of all requests
    slot_occupancy: float  # mean running replies over max_num_seqs, while busy
    kv_occupancy: float  # mean share of blocks in use, while busy
    busy: float  # of the time
    hit_rate: float  # prompt tokens found in the prefix cache
    preemptions: int
    swaps: int  # of these, to host memory
    copying: float  # of the busy time, for copies to host memory and back
    recomputed: float  # computed tokens over those that one pass over everything needs
    service_gap: float  # between interactive tenants that wait, at most: tokens over weight, a reply's twice
    service_bound: float  # what the gap is kept within
    step_stretch_p99: float  # a step with prompts in it over its decodes alone
    step_stretch_max: float

    def as_dict(self) -> dict[str, float]:
        """Return the figures by name."""
        return asdict(self)

    def text(self) -> str:
        """Return the figures a line each."""
        return "\n".join(f"{name:28} {value:.4g}" if isinstance(value, float) else f"{name:28} {value}"
                         for name, value in asdict(self).items())  # fmt: skip


def make_report(replicas: Sequence[Replica], promise: Promise, max_num_seqs: int) -> Report:
    """Add up what the replicas saw."""
    outcomes = [outcome for replica in replicas for outcome in replica.outcomes.values()]
    served = [outcome for outcome in outcomes if not outcome.refused]
    first_tokens = sorted(o.first_token - o.request.arrival for o in served if o.first_token is not None)
    gaps = sorted(gap for replica in replicas for gap in replica.gaps)
    stretches = sorted(stretch for replica in replicas for stretch in replica.runner.log.stretches)
    seconds = max((o.last_token for o in served), default=0.0) or 1e-9
    logs = [replica.runner.log for replica in replicas]
    busy = sum(log.seconds for log in logs) or 1e-9
    kept = sum(_is_kept(o, promise) for o in served)
    schedulers = [replica.loop.scheduler for replica in replicas]
    seen = sum(s.tables.prompt_tokens_seen for s in schedulers)
    found = sum(s.tables.prompt_tokens_found for s in schedulers)
    needed = seen - found + sum(o.tokens - 1 for o in served)
    return Report(
        requests=len(outcomes),
        refused=len(outcomes) - len(served),
        seconds=seconds,
        ttft_p50=percentile(first_tokens, 0.5),
        ttft_p90=percentile(first_tokens, 0.9),
        ttft_p99=percentile(first_tokens, 0.99),
        gap_p50=percentile(gaps, 0.5),
        gap_p90=percentile(gaps, 0.9),
        gap_p99=percentile(gaps, 0.99),
        output_tokens_per_second=sum(o.tokens for o in served) / seconds,
        goodput=kept / seconds,
        goodput_share=kept / max(len(outcomes), 1),
        slot_occupancy=sum(log.running_seconds for log in logs) / busy / max_num_seqs,
        kv_occupancy=sum(log.kv_seconds for log in logs) / busy,
        busy=busy / seconds / len(replicas),
        hit_rate=found / seen if seen else 0.0,
        preemptions=sum(s.running.num_preempted for s in schedulers),
        swaps=sum(s.running.num_swapped for s in schedulers),
        copying=sum(log.copying_seconds for log in logs) / busy,
        recomputed=sum(log.computed_tokens for log in logs) / max(needed, 1),
        service_gap=max(log.most_gap for log in logs),
        service_bound=max(s.admission.queues["interactive"].bound for s in schedulers),
        step_stretch_p99=percentile(stretches, 0.99),
        step_stretch_max=stretches[-1] if stretches else 0.0,
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value that ``share`` of a rising sequence do not exceed; 0 of an empty one."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _is_kept(outcome: RequestOutcome, promise: Promise) -> bool:
    if outcome.first_token is None:
        return False
    return outcome.first_token - outcome.request.arrival <= promise.first_token and outcome.longest_gap <= promise.gap
