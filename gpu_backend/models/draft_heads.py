# Heads that draft (MTP, EAGLE-3): one layer that reads a token and what the model made of the token before it. What the
# model made lies beside that token's keys and values in the KV cache, so that whatever moves a block moves it, too:
# the prefix cache, host memory, other engines. A head's own keys and values are made of it whenever they are asked for.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_backend.kernels import ops
from gpu_backend.kernels.layout.quantized_kv import KvScales
from gpu_backend.models.config.draft_heads import EagleConfig, mtp_layer
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import ModelConfig
from gpu_backend.models.layers import Decoder, DecoderLayer
from gpu_backend.models.linear import Product, load_linear
from gpu_backend.models.llama import load_layer
from gpu_backend.models.rope import RopeTable, rope_table
from gpu_backend.models.weights import WeightSource
from gpu_backend.step.step_tensors import StepTensors, token_by_token


class FeatureStore:
    """What the model made of each token, ``width`` numbers, in layers of the KV cache behind the model's own.

    Of a token that is being drafted it has what the head made of the one before.
    """

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.width = width
        self._dtype = dtype
        self._room: Tensor | None = None

    def layers_beside(self, numbers: int, dtype: torch.dtype) -> int:
        """Return how many layers it takes, each of which has ``numbers`` for a token."""
        return -(-self.width * self._dtype.itemsize // (numbers * dtype.itemsize))

    def open(self, room: Tensor) -> None:
        """Give it those layers (layers, blocks, block_size, …); until then nothing is kept."""
        self._room = room.flatten(3).flatten(1, 2)

    @property
    def is_open(self) -> bool:
        """Whether it has room."""
        return self._room is not None

    def put(self, slots: Tensor, features: Tensor) -> None:
        """Keep features (tokens, width) at the tokens' slots."""
        assert self._room is not None
        layers, _, numbers = self._room.shape
        rows = features.contiguous().view(self._room.dtype)
        rows = F.pad(rows, (0, layers * numbers - rows.shape[1])).view(-1, layers, numbers)
        self._room.index_copy_(1, slots, rows.transpose(0, 1))

    def get(self, slots: Tensor) -> Tensor:
        """Return the features (tokens, width) at these slots."""
        assert self._room is not None
        rows = self._room.index_select(1, slots).transpose(0, 1).flatten(1)
        used = self.width * self._dtype.itemsize // self._room.itemsize
        return rows[:, :used].contiguous().view(self._dtype)


@dataclass(frozen=True, slots=True)
class FeatureReader:
    """Keeps what a head reads of the model: the hidden states that go into some layers, made one, or the last ones."""

    store: FeatureStore
    layers: tuple[int, ...] = ()  # of the model; none: what its last norm makes
    join: Product | None = None

    def keep(self, states: list[Tensor], slots: Tensor) -> None:
        """Keep them for tokens at these slots."""
        if self.store.is_open:
            self.store.put(slots, states[0] if self.join is None else self.join(torch.cat(states, 1)))


@dataclass(frozen=True, slots=True)
class DraftHead:
    """One layer that makes drafts. At a token's place it reads the token behind that, and what the model made of it.

    MTP's ``join`` makes one vector of both; EAGLE-3's layer makes its queries, keys and values of both beside each
    other, and its drafts may be of a smaller vocabulary. What comes out is what a head reads of the next place.
    """

    lag: ClassVar[int] = 1  # places that its tokens stand before their own

    config: ModelConfig  # of the layer; ``vocab_size`` is that of its drafts
    features: FeatureStore
    embedding: Tensor
    token_norm: Tensor
    feature_norm: Tensor
    join: Product | None
    layer: DecoderLayer
    norm: Tensor
    head: Tensor  # (drafts' vocabulary, hidden)
    ropes: tuple[RopeTable, ...]
    vocab_size: int  # of the model
    token_ids: Tensor | None = None  # (drafts' vocabulary,): which tokens those are; None: the same
    adds_to_normed: bool = False
    batch_invariant: bool = False
    adapters: ClassVar[None] = None  # it drafts for all adapters as for the model alone

    def hidden_states(
        self, tensors: StepTensors, kv_cache: Tensor, kv_scales: Sequence[KvScales] | None = None
    ) -> Tensor:
        """Return what the head makes (tokens, hidden), and store its keys and values."""
        assert kv_scales is None, "a head's keys and values are kept as they are"
        if self.batch_invariant and not ops.uses_triton(kv_cache.device):
            return torch.cat([self._hidden_states(one, kv_cache) for one in token_by_token(tensors)])
        return self._hidden_states(tensors, kv_cache)

    def _hidden_states(self, tensors: StepTensors, kv_cache: Tensor) -> Tensor:
        eps = self.config.rms_norm_eps
        features = self.features.get(tensors.slots)
        read = ops.add_rms_norm(features, None, self.feature_norm, eps)[0]
        token = ops.add_rms_norm(F.embedding(tensors.token_ids, self.embedding), None, self.token_norm, eps)[0]
        both = torch.cat((token, read), 1)
        turns = [rope.at(tensors.positions) for rope in self.ropes]
        if self.join is not None:
            added, residual = self.layer(self.join(both), None, turns, kv_cache[0], None, tensors)
            return ops.add_rms_norm(added, residual, self.norm, eps)[0]
        qkv, residual = self.layer.attention.qkv(both), read if self.adds_to_normed else features
        added, residual = self.layer.after_qkv(qkv, residual, turns, kv_cache[0], None, tensors)
        return added + residual

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the token after each; those that it never drafts have none."""
        if self.join is None:
            hidden = ops.add_rms_norm(hidden, None, self.norm, self.config.rms_norm_eps)[0]
        logits = ops.linear(hidden, self.head, None, self.batch_invariant)
        if self.token_ids is None:
            return logits
        return logits.new_full((len(logits), self.vocab_size), -torch.inf).index_copy_(1, self.token_ids, logits)


def load_mtp_head(
    target: ModelConfig, model: Decoder, weights: WeightSource, max_model_len: int
) -> tuple[DraftHead, FeatureReader]:
    """Load the layer behind the model's own, and what reads the model for it. Raises ``UnsupportedModel``."""
    config = mtp_layer(target)
    prefix, hidden = f"model.layers.{config.layers_before}", config.hidden_size
    shape, of_stages = (config.vocab_size, hidden), () if len(model.embedding) else ("model.embed_tokens.weight",)
    store = FeatureStore(hidden, model.norm.dtype)
    head = DraftHead(
        config=config,
        features=store,
        embedding=_shared(weights, model.embedding, shape, f"{prefix}.embed_tokens.weight", *of_stages),
        token_norm=weights.get(f"{prefix}.enorm.weight", hidden),
        feature_norm=weights.get(f"{prefix}.hnorm.weight", hidden),
        join=load_linear(weights, (f"{prefix}.eh_proj",), (hidden,), 2 * hidden, False),
        layer=load_layer(config, weights, 0),
        norm=weights.get(f"{prefix}.shared_head.norm.weight", hidden),
        head=_shared(weights, model.head, shape, f"{prefix}.shared_head.head.weight"),
        ropes=_ropes(config, model.norm, max_model_len),
        vocab_size=config.vocab_size,
        batch_invariant=weights.linear.batch_invariant,
    )
    return head, FeatureReader(store)


def load_eagle_head(
    found: EagleConfig, target: ModelConfig, model: Decoder, weights: WeightSource, max_model_len: int
) -> tuple[DraftHead, FeatureReader]:
    """Load an EAGLE-3 head, and what reads the model for it. Raises ``UnsupportedModel``."""
    config, prefix = found.layer, "model.layers.0"
    hidden, drafted = config.hidden_size, config.vocab_size
    store = FeatureStore(hidden, model.norm.dtype)
    embedding = model.embedding
    if weights.has("model.embed_tokens.weight") or embedding.shape != (target.vocab_size, hidden):
        embedding = weights.get("model.embed_tokens.weight", target.vocab_size, hidden)
    head = DraftHead(
        config=config,
        features=store,
        embedding=embedding,
        token_norm=weights.get(f"{prefix}.input_layernorm.weight", hidden),
        feature_norm=weights.get(f"{prefix}.hidden_norm.weight", hidden),
        join=None,
        layer=load_layer(config, weights, 0, inputs=2 * hidden),
        norm=weights.get("model.norm.weight", hidden),
        head=weights.get("lm_head.weight", drafted, hidden),
        ropes=_ropes(config, model.norm, max_model_len),
        vocab_size=target.vocab_size,
        token_ids=_token_ids(weights, drafted, target.vocab_size),
        adds_to_normed=found.adds_to_normed,
        batch_invariant=weights.linear.batch_invariant,
    )
    width = len(found.layers_read) * target.hidden_size
    reader = FeatureReader(store, found.layers_read, load_linear(weights, ("fc",), (hidden,), width, False))
    if norms := [name for name in weights.unread() if "norm" in name and not name.startswith("verifier")]:
        raise UnsupportedModel(f"the head norms what no EAGLE-3 head of Llama's layers does: {', '.join(norms)}")
    return head, reader


def _shared(weights: WeightSource, of_model: Tensor, shape: tuple[int, int], *names: str) -> Tensor:
    """Return the first of these tensors that the checkpoint has, or the model's own, where that is the same, or where
    there is none: no head takes memory for what it shares. Another stage's is read again."""
    name = next((name for name in names if weights.has(name)), None)
    if name is None:
        return of_model if len(of_model) else weights.get(names[-1], *shape)
    own = weights.get(name, *shape)
    return of_model if torch.equal(own, of_model) else own


def _token_ids(weights: WeightSource, drafted: int, vocab_size: int) -> Tensor | None:
    """Return which of the model's tokens a head's are: ``d2t`` says how far behind its own number each stands."""
    if not weights.has("d2t"):
        if drafted == vocab_size:
            return None
        raise UnsupportedModel(f"the head drafts {drafted} of {vocab_size} tokens, but its checkpoint has no d2t")
    behind = weights.get_stored("d2t", torch.int64, drafted)
    token_ids = behind + torch.arange(drafted, device=behind.device)
    if token_ids.min() < 0 or token_ids.max() >= vocab_size or len(token_ids.unique()) < drafted:
        raise UnsupportedModel(f"the head's d2t names tokens twice, or others than the {vocab_size} that there are")
    return token_ids


def _ropes(config: ModelConfig, like: Tensor, max_model_len: int) -> tuple[RopeTable, ...]:
    return (rope_table(config.ropes[0], config.rope_dim, max_model_len, like),)
