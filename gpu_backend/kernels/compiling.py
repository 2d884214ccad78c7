# Kernels that are compiled at the start, several at once, and not while all streams wait for them.

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from gpu_backend.kernels.layout.paged import PagedLayout
from gpu_backend.kernels.layout.quantized_kv import FP8, KvScales

COMPILERS = 8  # kernels that are compiled at once


def compile_attention(
    query: Tensor,
    kv_cache: Tensor,
    layouts: Sequence[PagedLayout],
    windows: Sequence[int],
    kv_scales: KvScales | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """Compile all kernels of attention that these layouts need, in parallel; on a GPU.

    ``query`` (tokens, heads, head_dim) has rows for the longest of them.
    """
    from triton import AsyncCompileMode

    from gpu_backend.kernels.triton_ops import paged_attention as triton_attention

    kv_cache = kv_cache if kv_scales is None else kv_cache.view(FP8)
    cases = [(layout, window) for window in windows for layout in layouts]

    def go_through(launch: triton_attention.Launch) -> None:
        for layout, window in cases:
            rows = query[layout.rows]
            triton_attention.paged_attention(
                rows, kv_cache, layout, 1.0, window, kv_scales, launch=launch, softcap=softcap, sinks=sinks
            )

    with ThreadPoolExecutor(COMPILERS) as threads, AsyncCompileMode(threads):
        go_through(triton_attention.only_compile)
    go_through(triton_attention.run)  # and load them
