# The bytes of KV blocks, for engines that exchange them. Threads beside the step loop read and write them: on a GPU by
# streams of their own, through pinned memory, so that neither the device's steps nor the host's wait for a copy.

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_backend.kernels.layout.upload import upload
from gpu_backend.kv_transfer.seam import BlockFormat


class KvBlockStore:
    """The blocks of ``kv_cache`` (layers, blocks, block_size, 2, kv_heads, head_dim)."""

    def __init__(self, kv_cache: Tensor, fingerprint: str) -> None:
        layers, _, *shape = kv_cache.shape
        self._device_blocks = kv_cache
        self._of_thread = threading.local()
        self._shape = (layers, *shape)
        block_bytes = kv_cache[:, 0].numel() * kv_cache.itemsize
        dtype = str(kv_cache.dtype).removeprefix("torch.")
        self.format = BlockFormat(fingerprint, dtype, self._shape, block_bytes)

    def mark(self) -> torch.cuda.Event | None:
        """Note what was launched so far, without waiting for it."""
        if not self._device_blocks.is_cuda:
            return None
        mark = torch.cuda.Event()
        mark.record(torch.cuda.current_stream(self._device_blocks.device))
        return mark

    @torch.inference_mode()
    def read(self, blocks: Sequence[int]) -> memoryview:
        """Return the bytes of blocks, one after the other."""
        data = bytearray(len(blocks) * self.format.block_bytes)
        goal = torch.frombuffer(data, dtype=torch.uint8).view(self._device_blocks.dtype).view(-1, *self._shape)
        device = self._device_blocks.device
        if not self._device_blocks.is_cuda:
            goal.copy_(self._device_blocks.index_select(1, torch.as_tensor(blocks)).transpose(0, 1))
            return memoryview(data)
        with torch.cuda.device(device), torch.cuda.stream(self._stream()):
            ids = upload(blocks, device, torch.long)
            on_device = self._device_blocks.index_select(1, ids).transpose(0, 1).contiguous()
            staged = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
            staged.copy_(on_device, non_blocking=True)
            self._stream().synchronize()  # this thread waits, and no other
        goal.copy_(staged)
        return memoryview(data)

    @torch.inference_mode()
    def write(self, blocks: Sequence[int], data: memoryview, after: torch.cuda.Event | None) -> None:
        """Put bytes into blocks once all before the mark ``after`` is computed; they are there when it returns."""
        device = self._device_blocks.device
        numbers = torch.frombuffer(data, dtype=torch.uint8).view(self._device_blocks.dtype)
        numbers = numbers.view(len(blocks), *self._shape)
        if after is None:
            self._device_blocks.index_copy_(1, torch.as_tensor(blocks), numbers.transpose(0, 1))
            return
        with torch.cuda.device(device), torch.cuda.stream(self._stream()):
            self._stream().wait_event(after)
            staged = numbers.pin_memory().to(device, non_blocking=True)
            self._device_blocks.index_copy_(1, upload(blocks, device, torch.long), staged.transpose(0, 1))
            self._stream().synchronize()

    def _stream(self) -> torch.cuda.Stream:
        if not hasattr(self._of_thread, "stream"):
            self._of_thread.stream = torch.cuda.Stream(self._device_blocks.device)
        stream: torch.cuda.Stream = self._of_thread.stream
        return stream
