# The gated delta rule: Triton's decodes and plain torch's chunks against its definition in float64, token by token; and
# an engine whose decodes kernels compute.

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gpu_backend.kernels import reference_delta
from gpu_backend.kernels.triton_ops import delta
from gpu_backend.step.messages import Generate
from gpu_backend.step.sampling_params import SamplingParams
from tests.gpu.check import Check, Setting, relative_error, require
from tests.gpu.generation import ModelUnderTest
from tests.gpu.kernels import by_kernels, dtype_of, prompt_scores, worst_of
from tests.support.tiny_model import TinyModel

SIZES = ((2, 4, 8, 12), (1, 3, 20, 40), (2, 2, 16, 32))  # key heads, value heads, numbers of a key and of a value
REAL = (16, 32, 128, 128)


def decodes(setting: Setting) -> str:
    """One token of each of some sequences, whose states lie in rows in no order; the others' are left alone."""

    def error() -> float:
        mixed, decay, beta, sums = _inputs(setting, setting.dice.choice((2, 5)), states=7)
        rows = torch.tensor(setting.dice.sample(range(7), len(mixed)), device=setting.device)
        rows = rows.repeat_interleave(2)[::2]  # as graphs have them: a column of what they are told
        kept = sums.clone()
        made = delta.delta_step(mixed, decay, beta, kept, rows)
        others = [row for row in range(7) if row not in rows]
        require(torch.equal(kept[others], sums[others]), "another sequence's state has changed")
        expected = [
            _defined(*(each[i : i + 1] for each in (mixed, decay, beta)), sums[row]) for i, row in enumerate(rows)
        ]
        outs, states = (torch.stack([one[place] for one in expected]) for place in (0, 1))
        return max(relative_error(made, outs.flatten(0, 1)), relative_error(kept[rows], states))

    return worst_of(setting, error)


def chunks(setting: Setting) -> str:
    """Prompts of one chunk and of several, after a state that is there."""

    def error() -> float:
        length = setting.dice.choice((2, 63, 64, 150))
        mixed, decay, beta, sums = _inputs(setting, length, states=1)
        expected, state = _defined(mixed, decay, beta, sums[0])
        made = reference_delta.delta_chunks(mixed, decay, beta, sums[0])
        return max(relative_error(made, expected), relative_error(sums[0], state))

    return worst_of(setting, error)


def engine_of_states(setting: Setting) -> str:
    """Kernels score a prompt as plain torch does, in chunks and token by token, beside the layers that see all."""
    dice = setting.dice
    command = Generate("x", tuple(dice.randrange(256) for _ in range(11)), SamplingParams(1, 0.0, prompt_logprobs=0))
    model = TinyModel("Qwen3NextForCausalLM", seed=2 * dice.getrandbits(30))
    with tempfile.TemporaryDirectory() as folder:
        plain = ModelUnderTest(replace(setting, device=torch.device("cpu")), Path(folder), model)
        tested = ModelUnderTest(setting, Path(folder), model)
        expected = prompt_scores(plain.engine(), command)
        with by_kernels(setting):
            errors = [
                relative_error(
                    prompt_scores(tested.engine(max_num_seqs=1, max_num_batched_tokens=most), command), expected
                )
                for most in (1, 4)
            ]
    require(max(errors) <= 1e-4, f"relative errors {errors}")
    return f"worst relative error {max(errors):.0e}"


def _inputs(setting: Setting, tokens: int, states: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sizes = (*SIZES, REAL) if setting.device.type == "cuda" else SIZES
    key_heads, heads, key_dim, value_dim = setting.dice.choice(sizes)
    mixed = setting.randn(tokens, 2 * key_heads * key_dim + heads * value_dim).to(dtype_of(setting))
    decay, beta = -setting.randn(tokens, heads).float().exp(), setting.randn(tokens, heads).float().sigmoid()
    return mixed, decay, beta, setting.randn(states, heads, key_dim, value_dim).float()


def _defined(mixed: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return what one sequence's tokens make, and its state behind them."""
    heads, key_dim, value_dim = state.shape
    width = (mixed.shape[1] - heads * value_dim) // 2
    query, key, value = mixed.double().split((width, width, heads * value_dim), 1)
    query, key = (each.view(len(mixed), -1, key_dim) for each in (query, key))
    query, key = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (query, key))
    query, key = (each.repeat_interleave(heads // each.shape[1], 1) for each in (query / key_dim**0.5, key))
    value, state, outs = value.view(len(mixed), heads, value_dim), state.double(), []
    for token in range(len(mixed)):
        state = state * decay[token].double().exp()[:, None, None]
        lacking = value[token] - torch.einsum("hkv,hk->hv", state, key[token])
        state = state + torch.einsum("hk,hv->hkv", key[token], lacking * beta[token].double()[:, None])
        outs.append(torch.einsum("hkv,hk->hv", state, query[token]))
    return torch.stack(outs), state


CHECKS = (
    Check("kernel: delta rule of decodes", decodes, long=(torch.bfloat16,)),
    Check("delta rule in chunks", chunks, long=(torch.bfloat16,)),
    Check("kernel: an engine of states", engine_of_states, (torch.float32,), long=(torch.float32,)),
)
