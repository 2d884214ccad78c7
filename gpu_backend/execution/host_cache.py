# KV blocks in host memory, and the copies between them and the device's. A block lies in one piece there, all layers
# together, so that a copy is one large transfer; on a GPU host memory is pinned and a stream of its own makes them.

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from gpu_backend.kernels.layout.upload import upload
from gpu_backend.step.plan import BlockCopy


class HostCache:
    """``num_blocks`` blocks like those of ``kv_cache`` (layers, blocks, block_size, …)."""

    def __init__(self, num_blocks: int, kv_cache: Tensor) -> None:
        self._device_blocks = kv_cache
        layers, _, *shape = kv_cache.shape
        on_gpu = kv_cache.is_cuda
        self._blocks = torch.zeros((num_blocks, layers, *shape), dtype=kv_cache.dtype, pin_memory=on_gpu)
        self._stream = torch.cuda.Stream(kv_cache.device) if on_gpu else None

    def make(self, copies: Sequence[BlockCopy]) -> None:
        """Make the copies in their order. What the device computes next waits for them, the host does not."""
        if not copies:
            return
        if self._stream is None:
            self._make(copies)
            return
        compute = torch.cuda.current_stream(self._device_blocks.device)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            self._make(copies)
        compute.wait_stream(self._stream)

    def _make(self, copies: Sequence[BlockCopy]) -> None:
        for to_host, group in groupby(copies, lambda copy: copy.to_host):
            source_of = {copy.target: copy.source for copy in group}  # of two to one place the later counts
            ids = upload(list(source_of.values() if to_host else source_of), self._device_blocks.device, torch.long)
            if to_host:
                staged = self._device_blocks.index_select(1, ids).transpose(0, 1).contiguous()
                for block, target in zip(staged, source_of, strict=True):
                    self._blocks[target].copy_(block, non_blocking=True)
            else:
                staged = torch.empty((len(ids), *self._blocks.shape[1:]), dtype=self._blocks.dtype, device=ids.device)
                for block, source in zip(staged, source_of.values(), strict=True):
                    block.copy_(self._blocks[source], non_blocking=True)
                self._device_blocks.index_copy_(1, ids, staged.transpose(0, 1))
