# The least time that a step could take on its device: every byte that it must read once, at the bandwidth of a large
# copy, or its products at the rate of a large one, whichever takes longer. What share of its time a step could not have
# done without is the engine's own measure of how good it is.

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu_backend.hardware.timer import median_seconds
from gpu_backend.models.config.model import ModelConfig
from gpu_backend.models.experts import Experts
from gpu_backend.models.layers import Decoder
from gpu_backend.models.quantization import Linear
from gpu_backend.models.shards import num_bytes
from gpu_backend.step.cost import plan_work
from gpu_backend.step.plan import SequenceStep


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


# Bytes copied and the products' size: enough to tell, and quick enough for every start.
ENOUGH = {"cuda": (1 << 29, 4096), "cpu": (1 << 25, 512)}


class Roofline:
    """Knows what each step of a model must read and multiply, and how fast its device can.

    ``kv_bytes`` are a token's keys and values, all layers together; ``model`` may have a stage's of them only.
    """

    def __init__(self, config: ModelConfig, model: Decoder, kv_bytes: float, peaks: HardwarePeaks) -> None:
        head = config.vocab_size * config.hidden_size
        matrices: float = config.products_per_token - head
        attention = config.pair_operations * config.num_kv_layers / config.num_layers
        rate = (peaks.fp8_flops or peaks.flops) if _is_fp8(model) else peaks.flops
        all_layers = config.num_layers / len(model.layers) / peaks.bandwidth
        self._layer_weights = num_bytes(model.layers) * all_layers  # seconds, like all here
        mixtures = [layer.mlp for layer in model.layers if isinstance(layer.mlp, Experts)]
        stacks = tuple((mixture.gate_up, mixture.down, mixture.scales) for mixture in mixtures)
        self._experts = num_bytes(stacks) * all_layers  # of the layers' weights; their numbers may have fewer bits
        if config.experts is not None:  # other ranks multiply with those that this one has not
            elsewhere = 1 - config.experts.held / config.experts.number
            matrices -= elsewhere * (config.weights_read(1) - config.weights_read(0))
        self._last_weights = num_bytes((model.norm, model.head)) / peaks.bandwidth
        self._config = config
        self._token = 2 * matrices / rate
        self._logits = 2 * head / peaks.flops
        # What layers of linear attention keep of a sequence is read and written.
        state = config.linear.state_bytes(model.embedding.itemsize) if config.linear is not None else 0
        self._state = 2 * state / peaks.bandwidth
        # By how far a layer looks back: a key's reading, and a pair's products.
        self._layers = [
            (window, count / config.num_layers * kv_bytes / peaks.bandwidth, count * attention / peaks.flops)
            for window, count in Counter(config.windows).items()
        ]

    def least_seconds(self, steps: Sequence[SequenceStep]) -> float:
        """Return the least time of a step that computes these."""
        work = plan_work(steps)
        sampled = sum([step.num_draft_tokens + 1 for step in steps if step.samples])
        reading = self._layer_weights + self._last_weights + len(steps) * self._state
        if self._config.experts is not None:  # those that nothing chooses are not read
            reading -= self._experts * (1 - self._config.experts.share_read(work.tokens))
        multiplying = work.tokens * self._token + sampled * self._logits
        for window, key, pair in self._layers:
            if not window:
                reading += work.context * key
                multiplying += work.pairs * pair
                continue
            for step in steps:
                seen = min(step.start, window - 1) if window > 0 else step.start % -window
                count = len(step.token_ids)
                reading += (seen + count) * key
                multiplying += count * (seen + 1) * pair  # at least
        return max(reading, multiplying)


def measure_roofline(config: ModelConfig, model: Decoder, kv_bytes: float, device: torch.device) -> Roofline:
    """Measure the device, a tenth of a second, and return the roofline of the model on it."""
    dtype = model.embedding.dtype
    return Roofline(config, model, kv_bytes, measure_peaks(device, dtype, *ENOUGH[device.type], repeats=4))


def _is_fp8(model: Decoder) -> bool:
    """Whether products are of float8 on both sides: those with weights in blocks are not."""
    out = model.layers[0].attention.out if model.layers else None
    scales = out.scales if isinstance(out, Linear) and out.weight.dtype == torch.float8_e4m3fn else None
    return scales is not None and scales.dim() == 1
