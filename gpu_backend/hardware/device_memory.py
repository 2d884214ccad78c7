# The device memory of an engine that sleeps: its weights go to host memory, its KV cache is dropped. Tensors stay the
# same objects throughout: it is their storages that are emptied and filled again, so no view of one is ever stale.

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class DeviceMemory:
    """Gives back the storages of tensors, and takes them again: ``kept`` with what is in them, ``dropped`` as zeros.

    On a GPU host memory is pinned. Storages that cannot be emptied, such as a mapped file's, stay.
    """

    def __init__(self, kept: Iterable[Tensor], dropped: Iterable[Tensor]) -> None:
        self._kept = _wholes(kept)
        self._dropped = _wholes(dropped)
        self._sizes: dict[int, int] = {}  # bytes, of those that were emptied
        self._on_host: dict[int, Tensor] = {}

    @torch.inference_mode()
    def release(self) -> int:
        """Give all of it back, and return how many bytes those were. Nothing may compute.

        Raises ``RuntimeError`` where host memory lacks the room; nothing is given back then.
        """
        for name, whole in self._kept.items():
            if whole.untyped_storage().nbytes() and name not in self._on_host:
                host = torch.empty_like(whole, device="cpu", pin_memory=whole.is_cuda)
                self._on_host[name] = host.copy_(whole, non_blocking=True)
        _synchronize([*self._kept.values(), *self._dropped.values()])
        for name, whole in (self._kept | self._dropped).items():
            storage = whole.untyped_storage()
            if storage.nbytes():
                self._sizes[name] = storage.nbytes()
                storage.resize_(0)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return sum(self._sizes.values())

    @torch.inference_mode()
    def restore(self) -> None:
        """Take it again. Raises ``RuntimeError`` where another has the room meanwhile; ``release`` gives back the part
        that was had by then."""
        for name, whole in (self._kept | self._dropped).items():
            if name in self._sizes:
                whole.untyped_storage().resize_(self._sizes[name])
                if name in self._on_host:
                    whole.copy_(self._on_host[name], non_blocking=True)
                else:
                    whole.zero_()
                del self._sizes[name]
        _synchronize([*self._kept.values(), *self._dropped.values()])
        self._on_host.clear()


def _wholes(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return the bytes of each storage that can be emptied, once, by its address."""
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.resizable() and storage.nbytes() and storage.data_ptr() not in found:
            found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return found


def _synchronize(tensors: Iterable[Tensor]) -> None:
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)
