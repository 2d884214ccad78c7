# An event loop whose time is made up: where nothing is ready, the clock jumps to the next timer. What runs for a
# process stops with it, at whatever it was waiting for: a crash runs no ``finally``.

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import Any

LIFE: ContextVar[Life | None] = ContextVar("life", default=None)


class Life:
    """Whether what belongs to one process runs, stands still, or is over."""

    def __init__(self) -> None:
        self.is_over = False
        self.is_frozen = False
        self.parked: list[_Handle] = []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Single-threaded, with no sockets and no waiting. ``begin`` is the moment that time starts from."""

    def __init__(self) -> None:
        self.elapsed = 0.0
        super().__init__(_Jumping(self))
        self._clock_resolution = 1e-9
        self.set_exception_handler(lambda loop, context: None)

    def time(self) -> float:
        """Return seconds since the beginning."""
        return self.elapsed

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Call it in the next turn, unless its process is dead by then."""
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call it then, unless its process is dead by then."""
        return super().call_at(when, _Timed(callback), *args, context=context)

    def thaw(self, life: Life) -> None:
        """Let what stood still go on."""
        life.is_frozen = False
        self._ready.extend(life.parked)  # type: ignore[attr-defined]
        life.parked = []


class _Handle(asyncio.Handle):
    """A callback that knows whose it is."""

    def _run(self) -> None:
        life = self._context.get(LIFE)  # type: ignore[attr-defined]
        if life is None or not (life.is_over or life.is_frozen):
            super()._run()
        elif life.is_frozen and not life.is_over:
            life.parked.append(self)


class _Timed:
    """A timer's callback: it comes back as one that knows whose it is."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[..., Any]) -> None:
        self.callback = callback

    def __call__(self, *args: Any) -> None:
        life = LIFE.get()
        if life is None or not (life.is_over or life.is_frozen):
            self.callback(*args)
        elif not life.is_over:
            asyncio.get_running_loop().call_soon(self.callback, *args)


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list:
        """Let the time pass in which nothing happens."""
        if timeout is None:
            raise RuntimeError("everything waits for ever")
        if timeout > 0:
            self._loop.elapsed += timeout
        return []
