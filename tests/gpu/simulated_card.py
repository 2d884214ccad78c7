# A CUDA device that is none: tensors say they are on it and are computed on the CPU, kernels by Triton's interpreter.
# It is as strict as a real one where a mistake would only show there: what of the host's and of the device's meets in
# one operation, who waits for whom, what may happen while a graph is captured, which memory a replay writes over, what
# is read before its copy is complete, and which launches the compiler would compile anew.

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
WAITS = {  # operations whose result's shape or value the host must know
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten.is_nonzero.default, aten.item.default, aten.unique_dim.default, aten._unique2.default,
}  # fmt: skip
MOVES = {aten.to.dtype_layout, aten.to.device, aten.to.other, aten._to_copy.default}
GARBAGE = 77  # in memory that no kernel has written; as float not a number


class Misuse(Exception):
    """What a CUDA device would refuse, or answer with wrong numbers."""


CARDS: list[Card] = []


class OnCard(Tensor):
    """A tensor of the device; its numbers are ``inner``'s."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnCard:
        made: OnCard = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
        )  # type: ignore[attr-defined]  # fmt: skip
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)

    def data_ptr(self) -> int:
        """Return the address."""
        return self.inner.data_ptr()

    def cpu(self) -> Tensor:  # type: ignore[override]
        """Return a copy on the host, which waits for it."""
        CARDS[-1].wait("a copy to the host")
        return self.inner.clone()

    def tolist(self) -> Any:
        """Return the numbers, after waiting for them."""
        return self.cpu().tolist()

    item = tolist

    def __bool__(self) -> bool:
        return bool(self.cpu())

    def __int__(self) -> int:
        return int(self.cpu())

    def __float__(self) -> float:
        return float(self.cpu())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse: a card that is switched off computes nothing."""
        raise Misuse(f"{func} outside of the simulation")


class Card(TorchDispatchMode):
    """The device: what it was asked, in numbers, and what is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()  # by what the host waited for
        self.launches: Counter[str] = Counter()  # operations and kernels outside of graphs
        self.replays = 0
        self.compiled: dict[tuple[Any, ...], int] = {}  # what the compiler would have to compile, and the launch
        self.most_elements = 0  # of a tensor's reach, from its beginning
        self._capture: Capture | None = None
        self._pinned: dict[int, Tensor] = {}
        self._pending: list[Callable[[], object]] = []  # copies that are complete once the host has waited

    def wait(self, what: str) -> None:
        """Let the host wait for the device."""
        if self._capture is not None:
            raise Misuse(f"{what} while a graph is captured")
        self.waits[what] += 1
        self.finish()

    def finish(self) -> None:
        """Complete all copies."""
        with torch.inference_mode():
            for copy in self._pending:
                copy()
        self._pending.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute one operation."""
        kwargs = dict(kwargs or {})
        flat, _ = tree_flatten((args, kwargs))
        tensors = [value for value in flat if isinstance(value, Tensor)]
        on_card = [t for t in tensors if isinstance(t, OnCard)]
        if func in MOVES or (func is aten.copy_.default and on_card and len(on_card) < len(tensors)):
            return self._move(func, args, kwargs)
        if func is aten.pin_memory.default:
            return self._pin(args[0].clone())
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
        elif not on_card:
            pins = kwargs.pop("pin_memory", False)
            made = func(*args, **kwargs)
            return self._pin(made) if pins else made
        return self._compute(func, args, kwargs, tensors)

    def _compute(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        name = str(func)
        strangers = [t for t in tensors if not isinstance(t, OnCard) and t.dim()]
        if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    self.wait(f"{name} by a mask")
                elif index is not None and not isinstance(index, OnCard):
                    self.wait(f"{name} by an index of the host")
        elif strangers:
            raise Misuse(f"{name} of the device's tensors and one of the host's {tuple(strangers[0].shape)}")
        if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self.wait(name)
        if func in WAITS:
            self.wait(name)
        inner_of = {id(t.inner): t for t in tensors if isinstance(t, OnCard)}
        inner_args, inner_kwargs = tree_map(_inner, (args, kwargs))
        made = (
            func(*inner_args, **inner_kwargs) if func not in EMULATED else EMULATED[func](*inner_args, **inner_kwargs)
        )
        self._note(func, name, inner_args, inner_kwargs, made, tensors)

        def outer(value: Any) -> Any:
            known = inner_of.get(id(value))
            return known if known is not None else self._wrap(value) if isinstance(value, Tensor) else value

        return tree_map(outer, made)

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, made: Any, tensors: list[Tensor]) -> None:
        """Remember what a replay has to do again; poison what no kernel has written."""
        places = {_storage(t.inner) for t in tensors if isinstance(t, OnCard)}
        new = [t for t in tree_flatten(made)[0] if isinstance(t, Tensor) and _storage(t) not in places]
        if "empty" in name:
            for t in new:
                _spoil(t)
        mutates = func._schema.is_mutable
        if not (new or mutates):
            return  # a view
        if self._capture is None:
            self.launches[name] += 1
            return
        self._capture.memory += new

        def again() -> None:
            out = tree_flatten(EMULATED.get(func, func)(*args, **kwargs))[0]
            for kept, value in zip(tree_flatten(made)[0], out, strict=True):
                if isinstance(kept, Tensor) and kept is not value and "empty" not in name:
                    kept.copy_(value)

        self._capture.acts.append(again)

    def _wrap(self, inner: Tensor) -> OnCard:
        reach = sum((size - 1) * stride for size, stride in zip(inner.shape, inner.stride(), strict=True) if size)
        self.most_elements = max(self.most_elements, inner.storage_offset() + reach)
        return OnCard(inner)

    def _pin(self, tensor: Tensor) -> Tensor:
        if self._capture is not None:
            raise Misuse("memory is pinned while a graph is captured")
        if tensor.numel():
            self._pinned[_storage(tensor)] = tensor  # kept: no other tensor gets its address
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        return not tensor.numel() or _storage(tensor) in self._pinned

    def _move(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is aten.copy_.default:
            target, source = args[0], args[1]
            waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            self._copy(target, source, waits)
            return target
        source = args[0]
        device = kwargs.pop("device", None)
        rest = list(args[1:])
        if func is aten.to.device:
            device = rest.pop(0)
        if func is aten.to.other:
            device, rest[0] = rest[0].device, rest[0].dtype
            func = aten.to.dtype
        waits = not kwargs.get("non_blocking", False)
        device = source.device if device is None else torch.device(device)
        if (device.type == "cuda") == isinstance(source, OnCard):  # no more than another type
            inner = source.inner if isinstance(source, OnCard) else source
            dtype = next((d for d in [kwargs.get("dtype"), *rest] if isinstance(d, torch.dtype)), inner.dtype)
            if dtype == inner.dtype and not kwargs.get("copy"):
                return source
            return (
                self._compute(aten._to_copy.default, (source,), {"dtype": dtype}, [source])
                if isinstance(source, OnCard)
                else inner.to(dtype)
            )
        dtype = next((d for d in [kwargs.get("dtype"), *rest] if isinstance(d, torch.dtype)), source.dtype)
        if device.type == "cuda":
            target: Tensor = self._wrap(torch.empty_like(source, dtype=dtype, device="cpu"))
            self._copy(target, source, waits)
        else:
            target = torch.empty(source.shape, dtype=dtype)
            self._copy(target, source, waits)
        return target

    def _copy(self, target: Tensor, source: Tensor, waits: bool) -> None:
        host = source if isinstance(target, OnCard) else target
        if waits or not self._is_pinned(host):
            self.wait("a copy of pageable memory" if not waits else "a copy")
            _inner(target).copy_(_inner(source))
            return
        if self._capture is not None:
            raise Misuse("a copy between host and device is captured")
        if isinstance(target, OnCard):
            target.inner.copy_(source)
            before = source.clone()

            def check() -> None:
                if not torch.equal(before, source):
                    raise Misuse("pinned memory was written over before its copy was complete")

            self._pending.append(check)
            return
        came = source.inner.clone()  # type: ignore[attr-defined]
        _spoil(target)
        self._pending.append(lambda: target.copy_(came))

    def launch(self, kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a kernel, which the compiler would specialise to these arguments."""
        for value in args:
            if isinstance(value, Tensor) and not isinstance(value, OnCard):
                raise Misuse(f"{kernel.__name__} was given a tensor of the host")
        if any(size > most for size, most in zip(grid, (2**31 - 1, 65535, 65535), strict=False)):
            raise Misuse(f"the grid {grid} of {kernel.__name__} is too large")
        key = specialisation(kernel, args, kwargs)
        if key not in self.compiled and self._capture is not None:
            raise Misuse(f"{kernel.__name__} would be compiled while a graph is captured")
        self.compiled.setdefault(key, len(self.compiled))
        inner = tree_map(_inner, args)
        act = lambda: kernel.run(*inner, grid=grid, warmup=False, **kwargs)  # noqa: E731
        if self._capture is not None:
            self._capture.acts.append(act)
        else:
            self.launches[kernel.__name__] += 1
        act()


class Capture:
    """A graph: what was launched while it was captured, and the memory that took."""

    def __init__(self) -> None:
        self.acts: list[Callable[[], None]] = []
        self.memory: list[Tensor] = []


def specialisation(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a compiled kernel is valid for: types, constants, what is 1, and what 16 divides."""
    options = kernel.kwargs
    loose, unaligned = options.get("do_not_specialize") or (), options.get("do_not_specialize_on_alignment") or ()
    key: list[Any] = [kernel.__name__]
    for name, value in inspect.getcallargs(
        kernel.fn, *args, **{k: v for k, v in kwargs.items() if k in kernel.arg_names}
    ).items():
        if "constexpr" in str(kernel.fn.__annotations__.get(name, "")):
            key.append(value)
        elif isinstance(value, Tensor):
            aligned = value.storage_offset() * value.itemsize % 16 == 0 and name not in unaligned and name not in loose
            key.append((value.dtype, aligned))
        elif isinstance(value, int) and not isinstance(value, bool):
            wide = not -(2**31) <= value < 2**31
            key.append((wide,) if name in loose else (wide, value == 1, value % 16 == 0 and name not in unaligned))
        else:
            key.append(type(value))
    return (*key, kwargs.get("num_warps"), kwargs.get("num_stages"))


@contextmanager
def simulated_card() -> Iterator[Card]:
    """Let this process have a CUDA device."""
    from triton.runtime.interpreter import InterpretedFunction

    from gpu_backend.kernels.triton_ops import small_batch

    card = Card()
    make = torch.tensor

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        made = make(data, **options)
        return made if device is None or torch.device(device).type == "cpu" else made.to(device)

    move = Tensor.to

    def to(self: Tensor, *args: Any, **options: Any) -> Tensor:  # torch itself takes the device's for the host's
        return (
            move(self, args[0].device, args[0].dtype)
            if args and isinstance(args[0], OnCard)
            else move(self, *args, **options)
        )

    class Stream:
        def __init__(self, device: Any = None, **_: Any) -> None:
            self.device = device

        def wait_stream(self, other: Any) -> None:
            """Computation is in the order of its launches."""

        def synchronize(self) -> None:
            card.wait("a stream")

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.is_recorded = False

        def record(self, stream: Any = None) -> None:
            self.is_recorded = True

        def synchronize(self) -> None:
            if not self.is_recorded:
                raise Misuse("the event that is waited for was never recorded")
            card.wait("an event")

        def elapsed_time(self, end: Any) -> float:
            return 1.0

    graphs: list[Capture] = []

    class Graph:
        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            card._capture = self.capture = Capture()
            graphs.append(self.capture)

        def capture_end(self) -> None:
            card._capture = None

        def replay(self) -> None:
            for other in graphs:  # they share their memory
                for memory in other.memory if other is not self.capture else ():
                    _spoil(memory)
            card.replays += 1
            for act in self.capture.acts:
                act()

    @contextmanager
    def on_stream(_: Any) -> Iterator[None]:
        yield

    stream = Stream()
    properties = SimpleNamespace(multi_processor_count=132, name="simulated", total_memory=141 << 30, major=9, minor=0)
    cuda = {
        "is_available": lambda: True, "device_count": lambda: 1, "set_device": lambda _: None,
        "_lazy_init": lambda: None, "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: "simulated", "mem_get_info": lambda *_: (1 << 30, 1 << 30),
        "current_stream": lambda *_: stream, "stream": on_stream, "Stream": Stream, "Event": Event, "CUDAGraph": Graph,
        "graph_pool_handle": lambda: (0, 1), "synchronize": lambda *_: card.wait("the device"),
        "empty_cache": lambda: None, "is_initialized": lambda: True, "current_device": lambda: 0,
    }  # fmt: skip
    with ExitStack() as stack:
        for name, stand_in in cuda.items():
            stack.enter_context(patch.object(torch.cuda, name, stand_in))
        # the interpreter takes as long for few as for many
        stack.enter_context(patch.object(small_batch, "COLUMNS", 256))
        stack.enter_context(patch.object(torch, "tensor", tensor))
        stack.enter_context(patch.object(Tensor, "to", to))
        stack.enter_context(
            patch.object(
                InterpretedFunction, "__getitem__",
                lambda self, grid: lambda *args, **kwargs: card.launch(self, grid, args, kwargs),
            )
        )  # fmt: skip
        stack.enter_context(card)
        CARDS.append(card)
        stack.callback(CARDS.pop)
        yield card


def _scaled_mm(left: Tensor, right: Tensor, scale_a: Tensor, scale_b: Tensor, *rest: Any, **_: Any) -> Tensor:
    if left.stride(1) != 1 or right.stride(0) != 1 or left.shape[1] % 16 or right.shape[1] % 16:
        raise Misuse("_scaled_mm takes rows by columns, in multiples of 16")
    if scale_a.numel() > 1 and (scale_a.shape != (len(left), 1) or scale_b.shape != (1, right.shape[1])):
        raise Misuse("_scaled_mm takes one scale for each row and column")
    return ((left.float() @ right.float()) * scale_a * scale_b).to(rest[2])


EMULATED: dict[Any, Callable[..., Any]] = {aten._scaled_mm.default: _scaled_mm}


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, OnCard) else value


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _spoil(tensor: Tensor) -> None:
    tensor.fill_(torch.nan if tensor.is_floating_point() else GARBAGE)
