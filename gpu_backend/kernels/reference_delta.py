# The gated delta rule in plain torch (Yang et al. 2024, arXiv 2412.06464): a state forgets a share of what it has, then
# takes of each value what it could not have told by the key. A row is a token's queries, keys and values by heads, one
# kind behind the other; queries and keys have length one.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_backend.kernels.layout.recurrence import EPS

CHUNK = 64  # tokens that are computed at once


def delta_step(mixed: Tensor, decay: Tensor, beta: Tensor, sums: Tensor, rows: Tensor) -> Tensor:
    """Take one token of each sequence into its row of ``sums`` (rows, value heads, key_dim, value_dim), in place.

    ``decay``, logarithms, and ``beta`` are float32 (tokens, value heads). Returns (tokens, value heads, value_dim).
    """
    query, key, value = _heads_of(mixed, sums)
    state = sums.index_select(0, rows) * decay.exp()[..., None, None]
    told = (state * key[..., None]).sum(2)
    state += key[..., None] * ((value - told) * beta[..., None])[:, :, None]
    sums.index_copy_(0, rows, state)
    return (state * query[..., None]).sum(2).to(mixed.dtype)


def delta_chunks(mixed: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Take the tokens of one sequence into its ``state`` (value heads, key_dim, value_dim), in place.

    What the tokens of a chunk tell of each other is solved for at once; then chunk follows chunk.
    """
    tokens = len(mixed)
    size = min(CHUNK, tokens)
    padding = -tokens % size

    def chunked(x: Tensor) -> Tensor:  # (heads, chunks, size, …)
        padded = F.pad(x, (0, 0) * (x.dim() - 1) + (0, padding))
        return padded.unflatten(0, (-1, size)).movedim(2, 0)

    query, key, value = map(chunked, _heads_of(mixed, state[None]))
    share, fading = chunked(beta)[..., None], chunked(decay).cumsum(-1)
    between = (fading[..., :, None] - fading[..., None, :]).tril().exp().tril()  # from one token to a later one
    system = torch.eye(size, device=mixed.device) + ((key * share) @ key.mT * between).tril(-1)
    faded = fading.exp()[..., None]
    both = torch.cat((value * share, key * share * faded), -1)
    values, keys = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True).split(
        (value.shape[-1], key.shape[-1]), -1
    )
    inside = query @ key.mT * between
    query, last = query * faded, fading[..., -1:]
    key = key * (last - fading).exp()[..., None]
    kept = last.exp()[..., None]
    out = torch.empty_like(values)
    for chunk in range(values.shape[1]):
        new = values[:, chunk] - keys[:, chunk] @ state
        out[:, chunk] = query[:, chunk] @ state + inside[:, chunk] @ new
        state.mul_(kept[:, chunk]).add_(key[:, chunk].mT @ new)
    return out.flatten(1, 2)[:, :tokens].transpose(0, 1).to(mixed.dtype)


def _heads_of(mixed: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (tokens, value heads, …) in float32, queries scaled as scores are."""
    heads, key_dim, value_dim = sums.shape[1:]
    width = (mixed.shape[1] - heads * value_dim) // 2
    query, key, value = mixed.float().split((width, width, heads * value_dim), 1)
    query, key = (_unit(each.unflatten(1, (-1, key_dim))) for each in (query, key))
    repeats = heads * key_dim // width
    query, key = (each.repeat_interleave(repeats, 1) for each in (query * key_dim**-0.5, key))
    return query, key, value.unflatten(1, (heads, value_dim))


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()
