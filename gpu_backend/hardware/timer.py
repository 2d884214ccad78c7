# What the device takes for what is launched, measured by the device itself: the host launches and goes on.

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch


class Timer:
    """Measures the device's seconds between its making and ``stop``; on the CPU, which waits for itself, the host's."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._begin = torch.cuda.Event(enable_timing=True) if on_gpu else None
        self._end = torch.cuda.Event(enable_timing=True) if on_gpu else None
        self._seconds = -time.perf_counter()
        if self._begin is not None:
            self._begin.record()

    def begin(self, after: Sequence[object]) -> None:
        """Let the device's time begin here, unless it had this to do before: what the host prepared is not its time."""
        if self._begin is not None and not after:
            self._begin.record()

    def stop(self) -> None:
        """Mark the end of the work."""
        self._seconds += time.perf_counter()
        if self._end is not None:
            self._end.record()

    def wait(self) -> float:
        """Wait for the end, and return the seconds."""
        if self._begin is None or self._end is None:
            return self._seconds
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3


def median_seconds(act: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Return the median time after a quarter that does not count; on a GPU between events, without the launches."""
    measured = []
    for _ in range(repeats + repeats // 4):
        timer = Timer(device)
        act()
        timer.stop()
        measured.append(timer.wait())
    return statistics.median(measured[repeats // 4 :])
