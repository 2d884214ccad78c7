# What LoRA adapters add to a product, in plain torch: what runs on the CPU, and what the Triton kernel is judged by.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def add_lora_(out: Tensor, x: Tensor, shrink: Tensor, expand: Tensor, slots: Tensor, widths: Sequence[int]) -> Tensor:
    """Add to each row of ``out`` (rows, outputs) what its adapter makes of ``x`` (rows, inputs); return ``out``.

    ``slots`` (rows,) int32 says which adapter of the stacks a row has, less than 0: none. ``out`` holds the outputs of
    modules of these ``widths`` beside each other, all of which read ``x``. Module m adds expand[slot, its rows] ·
    shrink[slot, m · rank … (m + 1) · rank] · x; ``shrink`` is (slots, modules · rank, inputs), ``expand`` (slots,
    outputs, rank).
    """
    rank = expand.shape[2]
    for slot in slots.unique().tolist():
        if slot < 0:
            continue
        rows = (slots == slot).nonzero()[:, 0]
        inner = x.index_select(0, rows) @ shrink[slot].t()
        parts = [
            own @ of_module.t()
            for own, of_module in zip(inner.split(rank, 1), expand[slot].split(list(widths)), strict=True)
        ]
        out.index_add_(0, rows, torch.cat(parts, 1))
    return out
