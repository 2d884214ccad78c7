# What the engine says of its own load.

from __future__ import annotations

import pytest

from gpu_backend.kv_cache.blocks import BlockManager
from gpu_backend.scheduling.load import LoadMeter
from gpu_backend.step.messages import Abort
from tests.support.engine import answer_all, counting_loop, greedy


def test_rates_are_those_of_the_last_ten_seconds() -> None:
    """What happened longer ago no longer counts; a young engine is not flattered by a short window."""
    loop, _ = counting_loop(8, block_size=4)
    blocks = BlockManager(8, 4)
    meter = LoadMeter(started=100.0)

    meter.count_step(computed_tokens=50, generated_tokens=30, seconds=0.25)
    early = meter.report(loop.scheduler, blocks, now=100.5)
    for second in range(1, 31):
        meter.count_step(4, 4, 0.001)
        late = meter.report(loop.scheduler, blocks, now=100.5 + second)

    assert early.tokens_per_second == 30
    assert late.tokens_per_second == 4
    assert late.steps == 31
    assert late.counters["computed_tokens"] == 50 + 30 * 4


def test_report_tells_queue_blocks_and_hits() -> None:
    """Waiting replies are counted one by one; cached blocks are free ones, and not in use."""
    loop, _ = counting_loop(16, block_size=4, max_num_seqs=1, max_num_batched_tokens=64)
    answer_all(loop, [greedy("warm", range(9), 1)])
    idle = loop.load()
    loop.handle(greedy("runs", range(9), 20))
    loop.handle(greedy("waits", range(50, 59), 20, n=3))
    loop.step()

    busy = loop.load()
    loop.handle(Abort("waits"))

    assert (idle.running, idle.queue_depth, idle.free_blocks, idle.kv_utilization) == (0, 0, 16, 0.0)
    assert (busy.running, busy.queue_depth, busy.free_blocks, busy.kv_utilization) == (1, 3, 13, 3 / 16)
    assert busy.prefix_hit_rate == 8 / 18
    assert loop.load().queue_depth == 0


def test_share_of_the_roofline_is_that_of_the_busy_time() -> None:
    """Idle seconds are no fault of the device; what is not known, or long ago, is no share at all."""
    loop, _ = counting_loop(8, block_size=4)
    blocks = BlockManager(8, 4)
    meter = LoadMeter(started=100.0)

    unknown = meter.report(loop.scheduler, blocks, now=101.0)
    meter.count_step(5, 5, seconds=0.2, least_seconds=0.15)
    meter.count_step(5, 5, seconds=0.2, least_seconds=0.05)
    meter.count_step(0, 0, 0.1)
    busy = meter.report(loop.scheduler, blocks, now=105.0)
    later = [meter.report(loop.scheduler, blocks, now=now) for now in (110.0, 116.0)][-1]

    assert (unknown.roofline_share, later.roofline_share) == (0, 0)
    assert busy.roofline_share == pytest.approx(0.4)
    assert later.counters["least_seconds"] == pytest.approx(0.2)
