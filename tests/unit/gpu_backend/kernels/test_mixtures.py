# A mixture of experts for any routing: plain torch against its definition, the Triton kernels, interpreted, against
# plain torch.

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpu_backend.execution.warm_up import lengths_to_compile
from gpu_backend.kernels import reference_experts
from gpu_backend.models.shards import config_of_rank
from gpu_backend.simulate.hardware import PUBLISHED

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # which Triton must know before it is imported
Routing = list[list[int]]  # of each token its experts, one of them maybe twice


@st.composite
def routings(draw: st.DrawFn) -> tuple[int, Routing]:
    """Draw how many experts there are, and where tokens go: to any, all to one, or to some."""
    number, tokens, count = draw(st.integers(1, 20)), draw(st.integers(1, 40)), draw(st.integers(1, 4))
    used = draw(st.one_of(st.just([*range(number)]), st.lists(st.integers(0, number - 1), min_size=1, max_size=3)))
    each = st.lists(st.sampled_from(used), min_size=count, max_size=count)
    return number, draw(st.lists(each, min_size=tokens, max_size=tokens))


def inputs(number: int, routing: Routing) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    chosen = torch.tensor(routing).t().int().contiguous()
    shares = torch.rand(chosen.shape, generator=generator)
    x = torch.randn(len(routing), 24, generator=generator)
    gate_up, down = (torch.randn(number, *sizes, generator=generator) / 4 for sizes in ((20, 24), (24, 10)))
    return x, gate_up, down, shares, chosen


@settings(max_examples=15, deadline=None)
@given(routings())
def test_mixture_equals_its_definition(drawn: tuple[int, Routing]) -> None:
    """Each token's experts, one after the other, each with the token alone."""
    x, gate_up, down, shares, chosen = inputs(*drawn)
    expected = torch.zeros_like(x)
    for token, experts in enumerate(chosen.t().tolist()):
        for share, expert in zip(shares[:, token], experts, strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            expected[token] += share * (down[expert] @ (gate * gate.sigmoid() * up))

    found = reference_experts.mix_experts(x, gate_up, down, shares, chosen)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.soak
@pytest.mark.skipif(not INTERPRETED, reason="the test below starts a process for it, with TRITON_INTERPRET=1")
@settings(max_examples=40, deadline=None)
@example((16, [[3, 12]]))  # so few that each pair is a block by itself, one of them another rank's
@example((16, [[12, 3]]))
@given(routings())
def test_kernel_equals_plain_torch(drawn: tuple[int, Routing]) -> None:
    """For any routing, and for a rank that has some of the experts; and its pairs lie in blocks of one expert each, no
    pair lost and none there twice."""
    from gpu_backend.kernels.triton_ops import experts

    x, gate_up, down, shares, chosen = inputs(*drawn)
    blocks = experts.sort_pairs(chosen, drawn[0], 16)
    if blocks.is_sorted:
        used, pairs = int(blocks.counts[-1]), chosen.numel()
        placed = blocks.order.view(-1, 16)[:used]
        real = placed < pairs
        owners = blocks.owners[:used, None].expand_as(placed)
        assert used <= blocks.number and sorted(placed[real].tolist()) == list(range(pairs))
        assert torch.equal(chosen.flatten()[placed[real].long()], owners[real])

    found = experts.mix_experts(x, gate_up, down, shares, chosen)
    expected = reference_experts.mix_experts(x, gate_up, down, shares, chosen)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    half = drawn[0] // 2  # of the experts another rank has
    first, own = (0, slice(0, half)) if chosen[0, 0] < half else (half, slice(half, None))
    found, expected = (
        module.mix_experts(x, gate_up[own], down[own], shares, chosen, first=first)
        for module in (experts, reference_experts)
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_warming_up_meets_every_kernel_of_a_mixture(ranks: int) -> None:
    """Of a rank that has some of the experts, too: else the first prompt of a length waits for a compiler."""
    pytest.importorskip("triton")
    from gpu_backend.kernels.triton_ops.experts import FEW, MANY, MOST_PAIRS, SOME, experts_shape

    config = config_of_rank(PUBLISHED["gpt-oss-120b"], ranks, by_expert=True)
    assert config.experts is not None
    pairs = [config.experts.per_token * length for length in lengths_to_compile(config, False)]

    assert {experts_shape(some, 128 // ranks) for some in pairs} == {FEW, SOME, MANY}
    assert min(pairs) <= MOST_PAIRS[0] * 128 // ranks, "each pair by itself"


@pytest.mark.soak
def test_kernel_equals_plain_torch_interpreted() -> None:
    """The test above, where Triton interprets."""
    pytest.importorskip("triton")
    test = f"{__file__}::{test_kernel_equals_plain_torch.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "0", test]  # this test's own limit ends it
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
