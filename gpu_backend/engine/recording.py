# How what a function launches is recorded, to be launched again at once: as a CUDA graph, or not at all.

from __future__ import annotations

from collections.abc import Callable

import torch

Replay = Callable[[], None]
Recorder = Callable[[Callable[[], None]], Replay]


def cuda_recorder(device: torch.device) -> Recorder:
    """Return a recorder of CUDA graphs that share one pool of memory: they are replayed one after the other."""
    pool = torch.cuda.graph_pool_handle()
    side = torch.cuda.Stream(device)

    def record(act: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            act()  # kernels are compiled and libraries get ready before the capture
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                act()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(side)
        return graph.replay

    return record


def rerun(act: Callable[[], None]) -> Replay:
    """Stand in for a recorder where there is no CUDA: do it once, as a capture does, and again for each replay."""
    act()
    return act
