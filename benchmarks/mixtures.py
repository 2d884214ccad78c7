# What a mixture of experts costs on the CPU beside other ways to compute the same: a loop over all experts with masks,
# as transformers' eager one, its grouped product, and, for what the routing itself costs, a dense MLP as wide as the
# experts that a token has. All in one process, taking turns, so that the ratios hold on a busy machine.
#
#   python -m benchmarks.mixtures          some 40 s
#   python -m benchmarks.mixtures --tiny   a moment, to see that it runs

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_backend.kernels import reference_experts
from gpu_backend.kernels.reference import silu_and_mul

SHAPES = {  # experts, of a token, hidden, inner: a quarter of their real widths
    "as Mixtral": (8, 2, 1024, 3584),
    "as Qwen3-30B-A3B": (128, 8, 512, 192),
}
TOKENS = (1, 8, 64, 512)
ROUNDS = 15


def by_masks(x: Tensor, gate_up: Tensor, down: Tensor, shares: Tensor, experts: Tensor) -> Tensor:
    """Loop over experts, each looking for its tokens, as transformers' eager implementation does."""
    out = torch.zeros_like(x)
    mask = F.one_hot(experts.t().long(), len(gate_up)).permute(2, 1, 0)
    for expert in range(len(gate_up)):
        place, token = torch.where(mask[expert])
        inner = silu_and_mul(F.linear(x[token], gate_up[expert]))
        out.index_add_(0, token, F.linear(inner, down[expert]) * shares[place, token, None])
    return out


def by_groups(x: Tensor, gate_up: Tensor, down: Tensor, shares: Tensor, experts: Tensor) -> Tensor:
    """Sort pairs and let torch multiply all groups, as transformers' ``grouped_mm`` does."""
    order = experts.flatten().argsort(stable=True)
    token = order % len(x)
    ends = torch.bincount(experts.flatten(), minlength=len(gate_up)).cumsum(0).int()
    inner = silu_and_mul(torch._grouped_mm(x[token], gate_up.mT, ends))
    parts = torch._grouped_mm(inner, down.mT, ends) * shares.flatten()[order, None]
    return torch.zeros_like(x).index_add_(0, token, parts)


def measure(shape: tuple[int, int, int, int], tokens: int, rounds: int) -> dict[str, float]:
    """Return the median seconds of each way, after making sure that all say the same."""
    number, count, hidden, inner = shape
    generator = torch.Generator().manual_seed(0)
    gate_up, down, x, logits = (
        torch.randn(*sizes, generator=generator) / scale**0.5
        for sizes, scale in (
            ((number, 2 * inner, hidden), hidden), ((number, hidden, inner), inner), ((tokens, hidden), 1),
            ((tokens, number), 1),
        )
    )  # fmt: skip
    routing = reference_experts.choose_experts(logits, count, True)
    wide_up, wide_down = torch.randn(2 * count * inner, hidden), torch.randn(hidden, count * inner)
    ways: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: reference_experts.mix_experts(x, gate_up, down, *routing),
        "masks": lambda: by_masks(x, gate_up, down, *routing),
        "groups": lambda: by_groups(x, gate_up, down, *routing),
        "dense": lambda: F.linear(silu_and_mul(F.linear(x, wide_up)), wide_down),
        "choice": lambda: reference_experts.choose_experts(logits, count, True)[0],
    }
    for other in ("masks", "groups"):
        torch.testing.assert_close(ways[other](), ways["ours"](), atol=1e-4, rtol=1e-4)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(some) for name, some in seconds.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mixtures")
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args().tiny
    torch.set_num_threads(1)
    print("| float32, one thread | tokens | ours, ms | loop with masks | torch's groups | dense MLP | choice, ms |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    for name, shape in ({"tiny": (4, 2, 32, 16)} if tiny else SHAPES).items():
        for tokens in (1, 8) if tiny else TOKENS:
            with torch.inference_mode():
                found = measure(shape, tokens, 1 if tiny else ROUNDS)
            others = " | ".join(f"{found[way] / found['ours']:.2f} ×" for way in ("masks", "groups", "dense"))
            print(
                f"| {name} | {tokens} | {1e3 * found['ours']:.2f} | {others} | {1e3 * found['choice']:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
