# Where a model's tensors come from: the safetensors shards of a checkpoint, or dice. A model asks for each tensor by
# its Hugging Face name and the shape it needs, and an answer that does not fit says what would.

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.packed_format import PackedFormat
from gpu_backend.models.tensor_names import asked_name, fused_name, stacked_name

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "I8", "U8")  # types of numbers, as safetensors call them
SMOOTHED = ("int8", "w8a8", "int4")


@dataclass(frozen=True, slots=True)
class LinearOptions:
    """How matrix products are kept and computed."""

    quantization: str | None = None  # one of ``config.QUANTIZATIONS``; None: as they are
    batch_invariant: bool = False  # each row's sums in the same order however many rows there are
    add_ranks: Callable[[Tensor], Tensor] | None = None  # what adds up the ranks' parts; None: there is but one
    keeps_outliers: bool = False  # what comes between products stays as it was trained, as adapters read it

    @property
    def is_smoothed(self) -> bool:
        """Whether outliers are moved into the weights before they are rounded: float8 has no need of it."""
        return self.quantization in SMOOTHED and not self.keeps_outliers


@dataclass(frozen=True, slots=True)
class Rows:
    """Which of a tensor's rows are read: so many from one on, of all that it has."""

    first: int
    of: int


class WeightSource(ABC):
    """Gives a model its tensors, and says what is to become of those of matrix products."""

    linear: LinearOptions
    packed: PackedFormat | None = None  # None: every matrix is there as it is

    @abstractmethod
    def get(self, name: str, *shape: int, rows: Rows | None = None) -> Tensor:
        """Return the tensor of that name and shape, or some rows of it. Raises ``UnsupportedModel``."""

    def get_stored(self, name: str, dtype: torch.dtype, *shape: int, rows: Rows | None = None) -> Tensor:
        """Return the tensor of that name, shape and type, or some rows of it, as it is kept: packed or rounded numbers.
        Raises ``UnsupportedModel``."""
        raise UnsupportedModel(f"these weights have no {name} of {dtype}")

    def get_scales(self, name: str, *shape: int) -> Tensor:
        """Return float32 scales of that shape; one of a whole matrix is each row's. Raises ``UnsupportedModel``."""
        raise UnsupportedModel(f"these weights have no {name}")

    def has(self, name: str) -> bool:
        """Whether a tensor of that name is there."""
        return False

    def unread(self) -> list[str]:
        """Return the names of the tensors that nothing has asked for yet."""
        return []

    def is_packed(self, name: str) -> bool:
        """Whether the matrix of that name, of a module, is there packed, or rounded."""
        return False

    def own_experts(self, number: int) -> range:
        """Return which of a mixture's experts are to be loaded: all, where no other rank has some."""
        return range(number)


class Checkpoint(WeightSource):
    """The safetensors files of a Hugging Face checkpoint, one or several shards, read tensor by tensor."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        linear: LinearOptions | None = None,
        packed: PackedFormat | None = None,
    ) -> None:
        self.linear = linear or LinearOptions()
        self.packed = packed
        if packed is not None and self.linear.quantization is not None:
            raise UnsupportedModel(
                f"the checkpoint has weights of {packed.bits} bits already ({packed.method}); leave quantization out"
            )
        self._device = device
        self._dtype = dtype
        self._file_of: dict[str, Any] = {}
        self._unread: set[str] = set()
        self._stored: dict[str, str] = {}  # names in the files, by those that models ask for
        self._taken: Counter[str] = Counter()  # rows that were read of tensors that hold several
        for path, names in _shards(folder).items():
            shard = _open(path)
            for stored in shard.keys() if names is None else names:
                name = asked_name(stored)
                self._file_of[name], self._stored[name] = shard, stored
        self._unread |= self._file_of.keys()

    def get(self, name: str, *shape: int, rows: Rows | None = None) -> Tensor:
        """Return the tensor of that name and shape, on the device. Raises ``UnsupportedModel``."""
        tensor = self._read(name, shape, rows)
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            raise UnsupportedModel(f"tensor {name} is of {tensor.dtype}; float32, float16 or bfloat16 is needed")
        return tensor.to(self._device, self._dtype)

    def get_stored(self, name: str, dtype: torch.dtype, *shape: int, rows: Rows | None = None) -> Tensor:
        """Return the tensor of that name, shape and type, on the device. Raises ``UnsupportedModel``."""
        tensor = self._read(name, shape, rows)
        if tensor.dtype != dtype:
            needed = "int32 is needed" if dtype == torch.int32 else f"config.json calls for {dtype}"
            raise UnsupportedModel(f"tensor {name} is of {tensor.dtype}; {needed}")
        return tensor.to(self._device)

    def get_scales(self, name: str, *shape: int) -> Tensor:
        """Return float32 scales, on the device; one of a whole matrix is each row's. Raises ``UnsupportedModel``."""
        tensor = self._read(name, None).float()
        if tensor.numel() not in (1, math.prod(shape)):
            raise UnsupportedModel(f"tensor {name} has shape {tuple(tensor.shape)}; scales of {shape} are needed")
        return (tensor.reshape(shape) if tensor.numel() > 1 else tensor.reshape(()).expand(shape)).to(self._device)

    def has(self, name: str) -> bool:
        """Whether a tensor of that name is there."""
        return name in self._file_of

    def unread(self) -> list[str]:
        """Return the names of the tensors that nothing has asked for yet."""
        return sorted(self._unread)

    def is_packed(self, name: str) -> bool:
        """Whether a matrix is there packed, or rounded: its tensors tell. What config.json calls those that are not are
        patterns over the names that each writer has, and each reads them in a way of its own."""
        if self.packed is None:
            return False
        kinds = ("qweight", "weight_packed") if self.packed.is_of_words else ("weight",)
        asked = [each for kind in kinds for each in (f"{name}.{kind}", fused_name(f"{name}.{kind}"))]
        found = next((each for each in asked if each in self._file_of), None)
        if found is None or self.packed.is_of_words:
            return found is not None
        return self._file_of[found].get_slice(self._stored[found]).get_dtype() in EIGHT_BITS

    def _read(self, name: str, shape: tuple[int, ...] | None, rows: Rows | None = None) -> Tensor:
        if name not in self._file_of and shape:
            if (fused := fused_name(name)) in self._file_of:
                return self._read_rows(name, fused, shape)
            if stacked_name(name)[0] in self._file_of:
                return self._read_expert(name, shape)
        if name not in self._file_of:
            near = get_close_matches(name, self._unread, n=1)
            hint = f"; the nearest name there is {near[0]}" if near else ""
            of_shape = "" if shape is None else f" of shape {shape}"
            raise UnsupportedModel(f"the checkpoint has no tensor {name}{of_shape}{hint}")
        self._unread.discard(name)
        try:
            whole = self._file_of[name].get_slice(self._stored[name])
            found, called_for = tuple(whole.get_shape()), shape if rows is None or not shape else (rows.of, *shape[1:])
            if called_for is not None and found != called_for:
                raise UnsupportedModel(f"tensor {name} has shape {found}; config.json calls for {called_for}")
            if rows is not None and shape:
                tensor = whole[rows.first : rows.first + shape[0]]
            else:
                tensor = self._file_of[name].get_tensor(self._stored[name])
        except SafetensorError as error:
            raise UnsupportedModel(f"tensor {name} cannot be read from its shard: {error}") from error
        assert isinstance(tensor, Tensor)
        return tensor

    def _read_rows(self, name: str, fused: str, shape: tuple[int, ...]) -> Tensor:
        """Return the rows of a tensor that holds several: the last part lies at its end, keys before the values."""
        self._unread.discard(fused)
        part = self._file_of[fused].get_slice(self._stored[fused])
        rows, *rest = part.get_shape()
        own, module = shape[0], name.split(".")[-2]
        start = {"q_proj": 0, "gate_proj": 0, "k_proj": rows - 2 * own}.get(module, rows - own)
        before = {"k_proj": 1, "v_proj": 2, "up_proj": 1}.get(module, 0) and self._taken[fused]
        self._taken[fused] = before + own
        is_last = module in ("v_proj", "up_proj")
        if tuple(rest) != shape[1:] or start < 0 or start != before or (is_last and before + own != rows):
            raise UnsupportedModel(
                f"tensor {fused} has shape {(rows, *rest)}; config.json calls for {shape} of {module}"
            )
        tensor = part[start : start + own]
        assert isinstance(tensor, Tensor)
        return tensor

    def _read_expert(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return one expert's part of a tensor that holds all of them, gate above up: (experts, outputs, inputs),
        or, as Qwen3-VL and Llama 4 have them, (experts, inputs, outputs)."""
        stacked, expert, module = stacked_name(name)
        self._unread.discard(stacked)
        part = self._file_of[stacked].get_slice(self._stored[stacked])
        hidden, inner = shape if module == "down_proj" else shape[::-1]
        inputs_first = self._has_inputs_first(stacked.rsplit(".", 1)[0], hidden, inner)
        sizes = [hidden, inner] if module == "down_proj" else [2 * inner, hidden]
        experts, *rest = part.get_shape()
        if rest != (sizes[::-1] if inputs_first else sizes) or expert >= experts:
            raise UnsupportedModel(
                f"tensor {stacked} has shape {(experts, *rest)}; config.json calls for {tuple(sizes)} of each "
                f"expert, and for expert {expert}"
            )
        first = shape[0] if module == "up_proj" else 0
        rows = slice(first, first + shape[0])
        if inputs_first:
            tensor = part[expert : expert + 1, :, rows][0].t().contiguous()
        else:
            tensor = part[expert : expert + 1, rows][0]
        assert isinstance(tensor, Tensor)
        return tensor

    def _has_inputs_first(self, prefix: str, hidden: int, inner: int) -> bool:
        """Whether both of a layer's stacks have inputs before outputs: one of them is not square, and tells it."""
        which, sizes = ("down_proj", [inner, hidden]) if hidden != inner else ("gate_up_proj", [hidden, 2 * inner])
        stacked = f"{prefix}.{which}"
        found = self._file_of[stacked].get_slice(self._stored[stacked]).get_shape() if self.has(stacked) else []
        return found[1:] == sizes


class MultipliedWeights(WeightSource):
    """The tensors of ``source``, those of some modules multiplied: by the last part of their names."""

    def __init__(self, source: WeightSource, factors: Mapping[str, float]) -> None:
        self.linear = source.linear
        self._source = source
        self._factors = factors

    def get(self, name: str, *shape: int, rows: Rows | None = None) -> Tensor:
        """Return the tensor, multiplied and rounded once. Raises ``UnsupportedModel``."""
        tensor = self._source.get(name, *shape, rows=rows)
        factor = self._factors.get(name.split(".")[-2], 1.0)
        return tensor if factor == 1.0 else (tensor.float() * factor).to(tensor.dtype)

    def own_experts(self, number: int) -> range:
        """Return which of a mixture's experts are to be loaded."""
        return self._source.own_experts(number)


class RandomWeights(WeightSource):
    """Tensors drawn by chance from a fixed seed, for benchmarks of a shape whose weights are not at hand."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, seed: int = 0, linear: LinearOptions | None = None
    ) -> None:
        self.linear = linear or LinearOptions()
        self._device = device
        self._dtype = dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def get(self, name: str, *shape: int, rows: Rows | None = None) -> Tensor:
        """Return ones for a norm, zeros for a bias, else small normal numbers, as models start their training."""
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device, dtype=self._dtype)
        if name.endswith(".bias"):
            return torch.zeros(shape, device=self._device, dtype=self._dtype)
        tensor = torch.empty(shape, device=self._device, dtype=self._dtype)
        return tensor.normal_(0.0, 0.02, generator=self._generator)

    def get_scales(self, name: str, *shape: int) -> Tensor:
        """Return ones: a router's bias that makes no difference."""
        return torch.ones(shape, device=self._device)


def _shards(folder: Path) -> dict[Path, list[str] | None]:
    """Return each file, with the tensors that the index promises in it; None: all it has."""
    index_path = folder / INDEX_NAME
    if not index_path.exists():
        if not (folder / SINGLE_NAME).exists():
            raise UnsupportedModel(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}; only safetensors are loaded")
        return {folder / SINGLE_NAME: None}
    try:
        weight_map: dict[str, str] = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise UnsupportedModel(f"{index_path} has no readable weight_map: {error!r}") from error
    shards: dict[Path, list[str] | None] = {}
    for name, file in weight_map.items():
        names = shards.setdefault(folder / file, [])
        assert names is not None
        names.append(name)
    return shards


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise UnsupportedModel(f"{path} does not exist, though {INDEX_NAME} names it") from None
    except SafetensorError as error:
        raise UnsupportedModel(f"{path} is no complete safetensors file: {error}") from error
