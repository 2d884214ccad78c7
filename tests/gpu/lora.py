# LoRA adapters added to products in Triton against their definition in float64: any rows, ranks and widths, and rows
# with any adapter or none.

from __future__ import annotations

import torch
from torch import Tensor

from gpu_backend.kernels.triton_ops import lora
from tests.gpu.check import Check, Setting, relative_error, require
from tests.gpu.kernels import dtype_of, worst_of


def adapters_by_row(setting: Setting) -> str:
    """Packed and single modules; rows without an adapter keep their bits."""
    return worst_of(setting, lambda: _error(setting))


def adapters_whatever_the_batch(setting: Setting) -> str:
    """A row's sums are the same to the bit alone and in company."""
    out, x, shrink, expand, slots, widths = _inputs(setting, rows=37)
    together = lora.add_lora_(out.clone(), x, shrink, expand, slots, widths)
    for row in (0, 19, 36):
        one = slice(row, row + 1)
        alone = lora.add_lora_(out[one].clone(), x[one], shrink, expand, slots[one], widths)
        require(torch.equal(alone[0], together[row]), f"row {row} differs in company")
    return "37 rows, alone and together, equal bit for bit"


def _error(setting: Setting) -> float:
    on_card = setting.device.type == "cuda"
    rows = setting.dice.choice((1, 5, 16, 250, 2048) if on_card else (1, 5, 18))
    out, x, shrink, expand, slots, widths = _inputs(setting, rows)
    added = lora.add_lora_(out.clone(), x, shrink, expand, slots, widths)
    require(torch.equal(added[slots < 0], out[slots < 0]), "a row without an adapter has changed")
    rank, expected = expand.shape[2], out.double()
    for row, slot in enumerate(slots.tolist()):
        start = 0
        for module, width in enumerate(widths if slot >= 0 else ()):
            inner = shrink[slot, module * rank : (module + 1) * rank].double() @ x[row].double()
            expected[row, start : start + width] += expand[slot, start : start + width].double() @ inner
            start += width
    return relative_error(added, expected)


def _inputs(setting: Setting, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, tuple[int, ...]]:
    dtype, dice = dtype_of(setting), setting.dice
    inputs, rank, count = dice.choice((64, 200, 1600)), dice.choice((1, 8, 16, 24, 64)), dice.choice((1, 3, 9))
    widths = dice.choice(((70,), (96, 32, 32), (130, 130)))
    x, out = setting.randn(rows, inputs).to(dtype), setting.randn(rows, sum(widths)).to(dtype)
    shrink = (setting.randn(count, len(widths) * rank, inputs) / inputs**0.5).to(dtype)
    expand = (setting.randn(count, sum(widths), rank) / rank**0.5).to(dtype)
    drawn = [dice.randrange(-1, count) for _ in range(rows)]
    return out, x, shrink, expand, torch.tensor(drawn, dtype=torch.int32, device=setting.device), widths


CHECKS = (
    Check("kernel: adapters by row", adapters_by_row, long=(torch.float32,)),
    Check("kernel: adapters whatever the batch", adapters_whatever_the_batch, long=(torch.float32, torch.bfloat16)),
)
