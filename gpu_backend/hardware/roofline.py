# The least time that a step could take on its device: every byte that it must read once, at the bandwidth of a large
# copy, or its products at the rate of a large one, whichever takes longer. What share of its time a step could not have
# done without is the engine's own measure of how good it is.

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from gpu_backend.hardware.peaks import HardwarePeaks, measure_peaks
from gpu_backend.models.config.model import ModelConfig
from gpu_backend.models.experts import Experts
from gpu_backend.models.layers import Decoder
from gpu_backend.models.shards import num_bytes
from gpu_backend.step.cost import plan_work
from gpu_backend.step.plan import SequenceStep

# Bytes copied and the products' size: enough to tell, and quick enough for every start.
ENOUGH = {"cuda": (1 << 29, 4096), "cpu": (1 << 25, 512)}


class Roofline:
    """Knows what each step of a model must read and multiply, and how fast its device can.

    ``kv_bytes`` are a token's keys and values, all layers together; ``model`` may have a stage's of them only.
    """

    def __init__(self, config: ModelConfig, model: Decoder, kv_bytes: float, peaks: HardwarePeaks) -> None:
        head = config.vocab_size * config.hidden_size
        matrices = config.products_per_token - head
        attention = 4 * config.num_heads * config.head_dim  # operations of a layer for one query and one key
        rate = (peaks.fp8_flops or peaks.flops) if _is_fp8(model) else peaks.flops
        all_layers = config.num_layers / len(model.layers) / peaks.bandwidth
        self._layer_weights = num_bytes(model.layers) * all_layers  # seconds, like all here
        mixtures = [layer.mlp for layer in model.layers if isinstance(layer.mlp, Experts)]
        stacks = tuple((mixture.gate_up, mixture.down, mixture.scales) for mixture in mixtures)
        self._experts = num_bytes(stacks) * all_layers  # of the layers' weights; their numbers may have fewer bits
        self._last_weights = num_bytes((model.norm, model.head)) / peaks.bandwidth
        self._config = config
        self._token = 2 * matrices / rate
        self._logits = 2 * head / peaks.flops
        # By how far a layer looks back: a key's reading, and a pair's products.
        self._layers = [
            (window, count / config.num_layers * kv_bytes / peaks.bandwidth, count * attention / peaks.flops)
            for window, count in Counter(config.windows).items()
        ]

    def least_seconds(self, steps: Sequence[SequenceStep]) -> float:
        """Return the least time of a step that computes these."""
        work = plan_work(steps)
        sampled = sum([step.num_draft_tokens + 1 for step in steps if step.samples])
        reading = self._layer_weights + self._last_weights
        if self._config.experts is not None:  # those that nothing chooses are not read
            reading -= self._experts * (1 - self._config.experts.share_read(work.tokens))
        multiplying = work.tokens * self._token + sampled * self._logits
        for window, key, pair in self._layers:
            if not window:
                reading += work.context * key
                multiplying += work.pairs * pair
                continue
            for step in steps:
                seen, count = min(step.start, window - 1), len(step.token_ids)
                reading += (seen + count) * key
                multiplying += count * (seen + 1) * pair  # at least
        return max(reading, multiplying)


def measure_roofline(config: ModelConfig, model: Decoder, kv_bytes: float, device: torch.device) -> Roofline:
    """Measure the device, a tenth of a second, and return the roofline of the model on it."""
    dtype = model.embedding.dtype
    return Roofline(config, model, kv_bytes, measure_peaks(device, dtype, *ENOUGH[device.type], repeats=4))


def _is_fp8(model: Decoder) -> bool:
    return bool(model.layers) and model.layers[0].attention.out.weight.dtype == torch.float8_e4m3fn
