# Steps that sample, as the tensors that the kernel which draws reads.

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_backend.kernels.layout.sampling_tensors import SamplingTensors
from gpu_backend.kernels.layout.upload import upload
from gpu_backend.step.plan import SequenceStep


def sampling_tensors_of(steps: Sequence[SequenceStep], device: torch.device) -> SamplingTensors:
    """Return what each step asks, in two copies to the device."""
    asked = [step.sampling for step in steps]
    shares = upload(
        [[s.temperature for s in asked], [s.top_p for s in asked], [s.min_p for s in asked]], device, torch.float32
    )
    seeds = [signed(s.seed) for s in asked]
    positions = [step.start + len(step.token_ids) for step in steps]
    replies, top_ks = [step.reply_index for step in steps], [s.top_k for s in asked]
    numbers = upload([seeds, positions, replies, top_ks], device, torch.long)
    position, reply, top_k = numbers[1:].int()
    return SamplingTensors(shares[0], shares[1], shares[2], top_k, numbers[0], position, reply)


def signed(seed: int) -> int:
    """Return the same 64 bits, with a sign."""
    return (seed + 2**63) % 2**64 - 2**63
