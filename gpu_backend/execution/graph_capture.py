# How what a function launches is captured, to be launched again at once: as a CUDA graph, or not at all.

from __future__ import annotations

from collections.abc import Callable

import torch

Replay = Callable[[], None]


class CudaGraphCapture:
    """Captures CUDA graphs. They share one pool of memory: they are replayed one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)

    def warm_up(self, act: Callable[[], None]) -> None:
        """Do it on the stream that captures: kernels get compiled and libraries ready, and want of memory shows."""
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            act()
        torch.cuda.current_stream(self._device).wait_stream(self._side)

    def capture(self, act: Callable[[], None]) -> Replay:
        """Return how to launch again what was warmed up; what it allocates must stay where it is."""
        graph = torch.cuda.CUDAGraph()
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                act()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(self._side)
        return graph.replay


class EagerRerun:
    """Stands in for CUDA graphs where there are none: it does the same again for each replay."""

    def warm_up(self, act: Callable[[], None]) -> None:
        """Do it once."""
        act()

    def capture(self, act: Callable[[], None]) -> Replay:
        """Return it."""
        return act


GraphCapture = CudaGraphCapture | EagerRerun
