# Whole numbers suffer from outliers: an input channel thirty times as large as the others makes every step of its row
# thirty times as wide. While a checkpoint's weights are rounded, some tokens go through its layers, and a part of what
# makes a channel large is moved from the inputs into the weights (Xiao et al. 2022, SmoothQuant, arXiv 2211.10438).
# It is divided out in what comes before the product: in norms, in the values, in the MLP's up. Factors are powers of
# two, so the model's function stays the same to the bit.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_backend.kernels import reference
from gpu_backend.kernels.layout.scoring import first_seen
from gpu_backend.kernels.reference_attention import dot_products
from gpu_backend.models.layers import Attention, Decoder, DecoderLayer, Mlp
from gpu_backend.models.linear import Product
from gpu_backend.models.quantization import Linear, quantize
from gpu_backend.models.rope import RopeTable

TOKENS = 256  # from all over the vocabulary
STRENGTHS = (0.25, 0.5, 0.75)  # the paper's alpha: how far a factor follows the inputs, not the weights
# Of the squared error before: it must fall so far for a stronger one, since texts differ from those tokens.
WORTH = 0.81
FARTHEST = 10.0  # binades of a factor


@dataclass(frozen=True, slots=True)
class Passage:
    """Some tokens between two layers: what the last one adds (tokens, hidden), and what it is to be added to."""

    x: Tensor
    residual: Tensor | None
    turns: tuple[RopeTable, ...]  # the model's ropes at the tokens' positions


def begin_passage(model: Decoder) -> Passage:
    """Return tokens before the first layer, at the first of the model's positions; its layers are not asked for."""
    vocab, device = len(model.embedding), model.embedding.device
    count = min(TOKENS, len(model.ropes[0].cos), vocab)
    positions = torch.arange(count, device=device)
    x = model.embed(positions * (vocab // count))
    return Passage(x, None, tuple(rope.at(positions) for rope in model.ropes))


@torch.inference_mode()
def smooth(layer: DecoderLayer, passage: Passage, method: str) -> tuple[DecoderLayer, Passage]:
    """Return a layer of plain weights as it is best rounded by ``method``, and the tokens behind it."""
    attention, mlp = _attention_of(layer), _mlp_of(layer)
    qkv, out, gate_up, down = map(_plain, (attention.qkv, attention.out, mlp.gate_up, mlp.down))
    normed, residual = reference.add_rms_norm(passage.x, passage.residual, layer.attention_norm, layer.eps)
    attended = _attend(attention, _product(qkv, normed), passage)
    into_qkv = _factors_into(normed, qkv, layer.attention_norm, method)
    into_out = find_factors(attended, out.weight, method, lambda sizes: _largest_of_group(sizes, attention))
    added = layer.after_attention(layer.whole(_product(out, attended)))
    normed, residual = reference.add_rms_norm(added, residual, layer.mlp_norm, layer.eps)
    inner = mlp.gate(_product(gate_up, normed))
    into_mlp = _factors_into(normed, gate_up, layer.mlp_norm, method)
    into_down = find_factors(inner, down.weight, method)

    of_values = into_out.view(attention.num_kv_heads, -1, attention.head_dim)[:, 0].flatten()
    smoothed = replace(
        layer,
        attention_norm=_divided(layer.attention_norm, into_qkv),
        attention=replace(attention, qkv=_scaled(qkv, into_qkv, of_values), out=_scaled(out, into_out)),
        mlp_norm=_divided(layer.mlp_norm, into_mlp),
        mlp=replace(mlp, gate_up=_scaled(gate_up, into_mlp, into_down), down=_scaled(down, into_down)),
    )
    return smoothed, replace(passage, x=layer.after_mlp(layer.whole(_product(down, inner))), residual=residual)


def rounded(layer: DecoderLayer, method: str) -> DecoderLayer:
    """Return a layer of plain weights with them rounded."""

    def product(linear: Product) -> Linear:
        plain = _plain(linear)
        return quantize(plain.weight, plain.bias, method, plain.batch_invariant)

    attention = replace(layer.attention, qkv=product(layer.attention.qkv), out=product(layer.attention.out))
    mlp = _mlp_of(layer)
    mlp = replace(mlp, gate_up=product(mlp.gate_up), down=product(mlp.down))
    return replace(layer, attention=attention, mlp=mlp)


def find_factors(x: Tensor, weight: Tensor, method: str, share: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return by what to divide each input channel (in,), and multiply its weights, so that rounding costs less.

    ``x`` (rows, in) are some inputs, ``weight`` is (out, in). ``share`` makes the sizes of channels (in,) equal that
    must have one factor.
    """
    of_inputs, of_weights = (some.abs().amax(0).float().clamp(min=1e-5) for some in (x, weight))
    if share is not None:
        of_inputs, of_weights = share(of_inputs), share(of_weights)
    best = torch.ones_like(of_inputs)
    least = _rounding_error(x, weight, best, method)
    for strength in STRENGTHS:
        binades = strength * of_inputs.log2() - (1 - strength) * of_weights.log2()
        factors = (binades - binades.median()).round().clamp(-FARTHEST, FARTHEST).exp2()
        error = _rounding_error(x, weight, factors, method)
        if not error < WORTH * least:
            break
        best, least = factors, error
    return best


def _factors_into(normed: Tensor, product: Linear, norm: Tensor | None, method: str) -> Tensor:
    """Return those that a norm before a product takes; without one there is no place for any."""
    if norm is None:
        return torch.ones(normed.shape[1], device=normed.device)
    return find_factors(normed, product.weight, method)


def _divided(norm: Tensor | None, factors: Tensor) -> Tensor | None:
    return None if norm is None else norm / factors.to(norm)


def _rounding_error(x: Tensor, weight: Tensor, factors: Tensor, method: str) -> float:
    """Return ‖product of what was rounded − product‖²."""
    kept = quantize(weight * factors.to(weight), None, method)
    assert kept.scales is not None
    out = reference.quantized_linear(x.float() / factors, kept.weight, kept.scales, None, None, kept.rounds_input)
    return (out - F.linear(x.float(), weight.float())).square().sum().item()


def _attend(attention: Attention, qkv: Tensor, passage: Passage) -> Tensor:
    """Return what queries see of the tokens up to their own, (tokens, heads · head_dim)."""
    attention.norm_widths_(qkv)
    rotated = attention.num_heads + attention.num_kv_heads
    heads = qkv.view(len(qkv), rotated + attention.num_kv_heads, attention.head_dim)
    query_key = heads[:, :rotated]
    if attention.qk_norm is not None:
        query_key = reference.rms_norm(query_key, attention.qk_norm, attention.eps)
    by = passage.turns[attention.rope]
    query_key = reference.apply_rope(query_key, by.cos, by.sin, by.turned, by.interleaved)
    if by.queries is not None:
        query_key[:, : attention.num_heads] *= by.queries
    query, key, value = (
        some.transpose(0, 1)[None]
        for some in (query_key[:, : attention.num_heads], query_key[:, attention.num_heads :], heads[:, rotated:])
    )
    places = torch.arange(len(qkv), device=qkv.device)
    back = places[:, None] - places
    hidden = back < 0
    if attention.scoring.window:
        hidden |= places < first_seen(places, attention.scoring.window)[:, None]
    mask = torch.zeros_like(back, dtype=qkv.dtype).masked_fill_(hidden, -torch.inf)
    attended = dot_products(query, key, value, mask, attention.scoring)
    return attended[0].transpose(0, 1).flatten(1)


def _largest_of_group(sizes: Tensor, attention: Attention) -> Tensor:
    """Return for each channel the largest of all query heads that read the same values."""
    grouped = sizes.view(attention.num_kv_heads, -1, attention.head_dim)
    return grouped.amax(1, keepdim=True).expand_as(grouped).flatten()


def _scaled(product: Linear, of_inputs: Tensor, of_last_outputs: Tensor | None = None) -> Linear:
    """Return it for inputs divided by the one, with its last outputs divided by the other."""
    weight, bias = product.weight * of_inputs.to(product.weight), product.bias
    if of_last_outputs is not None:
        shrink = of_last_outputs.reciprocal().to(weight)
        weight[-len(shrink) :] *= shrink[:, None]
        if bias is not None:
            bias = torch.cat([bias[: -len(shrink)], bias[-len(shrink) :] * shrink])
    return replace(product, weight=weight, bias=bias)


def _product(product: Linear, x: Tensor) -> Tensor:
    return F.linear(x, product.weight, product.bias)


def _mlp_of(layer: DecoderLayer) -> Mlp:
    assert isinstance(layer.mlp, Mlp), "mixtures of experts refuse what is smoothed"
    return layer.mlp


def _attention_of(layer: DecoderLayer) -> Attention:
    assert isinstance(layer.attention, Attention), "attention over latent vectors refuses what is smoothed"
    return layer.attention


def _plain(product: Product) -> Linear:
    assert isinstance(product, Linear) and product.scales is None, "weights are rounded once"
    return product
