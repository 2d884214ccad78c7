# What a runner does before the first request comes: kernels are compiled, libraries get ready, copies are measured.

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from gpu_backend.execution.host_cache import HostCache
from gpu_backend.hardware.timer import median_seconds
from gpu_backend.kernels.layout.paged import PagedLayouts
from gpu_backend.kernels.layout.quantized_kv import FP8, KvScales
from gpu_backend.kernels.layout.scoring import Scoring
from gpu_backend.models.config.model import ModelConfig
from gpu_backend.step.adapter import NONE
from gpu_backend.step.plan import BlockCopy, SequenceStep, StepPlan
from gpu_backend.step.sampling_params import SamplingParams

COPIES_TO_MEASURE = 16  # blocks, each way
COMPILERS = 8  # kernels of attention that are compiled at once
LENGTHS_TO_COMPILE = (100, 200)  # of prompts: products of so many rows, and of more, have kernels of their own
SMALL_BATCHES = (2, 4)  # small batches of two and of four have kernels of their own, too


def lengths_to_compile(model: ModelConfig, own_products: bool) -> tuple[int, ...]:
    """Return the lengths of prompts whose kernels differ; ``own_products``: no library multiplies the weights."""
    lengths = SMALL_BATCHES + (LENGTHS_TO_COMPILE if own_products else ())
    if model.experts is None:
        return lengths
    from gpu_backend.kernels.triton_ops.experts import MOST_PAIRS  # needs a compiler

    pairs = (0, *(most * model.experts.held for most in MOST_PAIRS))
    return lengths + tuple(math.floor(some / model.experts.per_token) + 1 for some in pairs)


def plans_of_no_request(
    block_size: int, num_blocks: int, lengths: Sequence[int], adapter: int = NONE
) -> Iterator[StepPlan]:
    """Yield a prompt, the decode after it, and prompts of these lengths, all with that adapter."""
    prompt = block_size if num_blocks > 1 else block_size - 1
    pieces = [(prompt, 0, SamplingParams(2)), (1, prompt, SamplingParams(2, top_p=0.9))]
    pieces += [(length, 0, SamplingParams(2)) for length in lengths]
    for step, (count, start, sampling) in enumerate(pieces):
        table = tuple(range(-(-(start + count) // block_size)))
        yield StepPlan(step, (SequenceStep(0, (0,) * count, start, table, True, sampling, 0, adapter=adapter),))


@torch.inference_mode()
def compile_attention_for(
    model: ModelConfig, layouts: PagedLayouts, kv_cache: Tensor, dtype: torch.dtype, kv_scales: KvScales | None
) -> None:
    """Let every kernel of attention be compiled now, several at once, not while all streams wait for it; ``kv_cache``
    is one layer's.
    """
    from triton import AsyncCompileMode

    from gpu_backend.kernels.triton_ops.latent_attention import latent_attention
    from gpu_backend.kernels.triton_ops.paged_attention import Launch, only_compile, paged_attention, run

    of_window = {(window > 0, window < 0): window for window in model.windows}
    samples = list(layouts.samples(model.vision is not None and model.vision.both_ways))
    longest = max(layout.max_query_len for layout in samples)
    query = torch.zeros((longest, model.num_heads, model.head_dim), dtype=dtype, device=kv_cache.device)
    sinks = torch.zeros(model.num_heads, device=kv_cache.device) if model.has_sinks else None
    cache = kv_cache if kv_scales is None else kv_cache.view(FP8)
    parts: tuple[Tensor, ...] = ()
    if model.latent is not None:
        parts = tuple(query.new_zeros(longest, model.num_heads, dim) for dim in (model.latent.rank, model.rope_dim))

    def go_through(launch: Launch) -> None:
        for window in of_window.values():
            for layout in samples:
                scoring = Scoring(1.0, window, model.softcap, sinks)
                if model.latent is not None:
                    own, turned = (part[layout.rows] for part in parts)
                    latent_attention(own, turned, cache, layout, scoring, launch=launch)
                    continue
                paged_attention(query[layout.rows], cache, layout, scoring, kv_scales, launch=launch)

    with ThreadPoolExecutor(COMPILERS) as threads, AsyncCompileMode(threads):
        go_through(only_compile)
    go_through(run)  # and load them


def seconds_per_copy(host_cache: HostCache, most: int, device: torch.device) -> float | None:
    """Return what a block's way to host memory or back takes, of up to ``most`` blocks; None of none."""
    count = min(most, COPIES_TO_MEASURE)
    if not count:
        return None
    copies = [BlockCopy(block, block, to_host) for to_host in (True, False) for block in range(count)]
    host_cache.make(copies)  # the first time warms up
    return median_seconds(lambda: host_cache.make(copies), device, 1) / len(copies)
