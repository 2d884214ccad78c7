# What a device can do at most, measured on the spot: the bandwidth of a large copy, the rate of a large matrix product.

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class HardwarePeaks:
    """Bytes per second of a device's memory, operations per second in the model's type, and in fp8; 0: none."""

    bandwidth: float
    flops: float
    fp8_flops: float = 0.0


def measure_peaks(
    device: torch.device, dtype: torch.dtype, copied_bytes: int, size: int, repeats: int = 20
) -> HardwarePeaks:
    """Return the bandwidth of a copy, read and written bytes together, and the rates of ``size``³ products.

    The copy must be several times as large as the device's caches. All numbers are random: zeros are faster.
    """
    source = torch.randn(copied_bytes // 4, device=device)
    target = torch.empty_like(source)
    copying = median_seconds(lambda: target.copy_(source), device, repeats)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = median_seconds(lambda: left @ right, device, repeats)
    fp8 = _fp8_rate(left, right, repeats) if device.type == "cuda" else 0.0
    return HardwarePeaks(2 * source.nbytes / copying, 2 * size**3 / product, fp8)


def _fp8_rate(left: torch.Tensor, right: torch.Tensor, repeats: int) -> float:
    try:
        low, high = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t().contiguous().t()
        one = torch.ones((), device=left.device)
        seconds = median_seconds(
            lambda: torch._scaled_mm(low, high, scale_a=one, scale_b=one, out_dtype=torch.bfloat16),
            left.device,
            repeats,
        )
    except (RuntimeError, AttributeError):
        return 0.0
    return 2 * len(left) ** 3 / seconds


def median_seconds(act: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Return the median time after a quarter that does not count; on a GPU between events, without the launches."""
    clock = _event_seconds if device.type == "cuda" else _host_seconds
    return statistics.median([clock(act) for _ in range(repeats + repeats // 4)][repeats // 4 :])


def _event_seconds(act: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    act()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _host_seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started
