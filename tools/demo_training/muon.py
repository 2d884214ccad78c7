# Muon: momentum whose update is made orthogonal before it is applied, so that every direction of a weight matrix learns
# at the same rate, rare facts too. Written here because torch.optim.Muon works in bfloat16, which CPUs are slow at.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

# Newton-Schulz coefficients and step count of Jordan et al., "Muon: An optimizer for hidden layers" (2024).
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


class Muon:
    """Updates hidden weight matrices in place; embeddings and norms need another optimizer."""

    def __init__(self, matrices: Iterable[torch.Tensor], momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        self._momentum = momentum
        self._weight_decay = weight_decay
        self._by_shape: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
        for matrix in matrices:
            self._by_shape[matrix.shape].append(matrix)
        self._momenta = {shape: torch.zeros(len(group), *shape) for shape, group in self._by_shape.items()}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Apply the gradients at this learning rate; equal shapes are orthogonalised together."""
        for shape, group in self._by_shape.items():
            gradients = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            momenta = self._momenta[shape].lerp_(gradients, 1 - self._momentum)
            updates = orthogonalised(gradients.lerp_(momenta, self._momentum))  # Nesterov's look ahead
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            for matrix, update in zip(group, updates, strict=True):
                matrix.mul_(1 - rate * self._weight_decay).sub_(update, alpha=rate * scale)
                matrix.grad = None


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """Each of ``matrices`` (count, rows, columns) with its singular values moved close to one, by Newton-Schulz."""
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x if wide else x.mT
