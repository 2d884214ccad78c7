# How a gateway ends without losing a request. Asked to stop, it first goes on as before but says so: not ready, and
# `connection: close` in every answer, so that balancers send new requests elsewhere (the lame duck). Then it stops
# accepting, lets running calls end, and at the end of the drain aborts the rest with an error that the client can read.
# Asked twice, it breaks off at once. Either way every call's accounting is closed before its last bytes.

from __future__ import annotations

import asyncio
import select
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from types import FrameType
from typing import Any, Protocol, cast

import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from protocol.serving.listening import close_door

LOOK_EVERY = 0.05  # seconds between looks at what still runs
HANDSHAKES = 0.25  # seconds for connections that are being made when accepting stops
FIRST_REQUEST = 2.0  # seconds in which a connection that was just made sends what it was made for
LAST_WORDS = 2.0  # seconds for the last bytes of calls that are broken off
SETTLE_WITHIN = 5.0  # seconds for background tasks when the gateway closes
A_MOMENT = 0.01  # seconds between looks at what says its last words
HURRIED = 0.5  # both, when asked twice
CLOSE_WITHIN = 2.0  # seconds for closing the gateway, when asked twice

log = structlog.get_logger()


class LongConnection(Protocol):
    """A connection that speaks another protocol than HTTP."""

    def end_when_idle(self) -> None:
        """Close it if nothing is answered on it; what answers closes it else."""


class Drain:
    """Whether the gateway is ending: what the server knows and the app tells."""

    def __init__(self) -> None:
        self.has_begun = False
        self.settle_within = SETTLE_WITHIN  # seconds
        self.runs_more: Callable[[], bool] = lambda: False  # whether calls run that no connection waits for


class DrainingServer(uvicorn.Server):
    """A uvicorn server that ends in the steps above. ``seconds`` is for all of them, ``lame_duck`` for the first.

    ``on_hangup`` is called at SIGHUP (``hang_up``), by the loop, unless the server ends.

    ``is_shared``: another process accepts on the same socket, and its creator stops accepting (``close_door``).
    """

    def __init__(
        self,
        config: uvicorn.Config,
        drain: Drain,
        *,
        seconds: float,
        lame_duck: float,
        is_shared: bool,
        on_hangup: Callable[[], Coroutine[Any, Any, object]],
    ) -> None:
        super().__init__(config)
        self._drain = drain
        self._seconds = seconds
        self._lame_duck = min(lame_duck, seconds)
        self._is_shared = is_shared
        self._on_hangup = on_hangup
        self._is_hung_up = False
        self._reloading: asyncio.Task[object] | None = None

    def hang_up(self, *_: object) -> None:
        """Note SIGHUP."""
        self._is_hung_up = True

    async def on_tick(self, counter: int) -> bool:
        """Look, every 100 ms, whether there is anything to be done."""
        if self._is_hung_up and (self._reloading is None or self._reloading.done()):
            self._is_hung_up = False
            self._reloading = asyncio.create_task(self._on_hangup())
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain at the first signal; at the second, whichever it is, break off."""
        if sig == signal.SIGINT:
            self._lame_duck = 0.0  # SIGINT at a terminal, where there is no load balancer
        if self.should_exit:
            self.force_exit, self._drain.settle_within = True, HURRIED
        self._drain.has_begun = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End as the head of this file says."""
        self._drain.has_begun = True
        began = _now()
        log.info("draining", seconds=self._seconds, lame_duck=self._lame_duck, running=len(self.server_state.tasks))
        async for _ in self._looks(began + self._lame_duck):
            pass
        await self._stop_accepting(sockets or [])
        closed = _now()
        async for _ in self._looks(began + self._seconds):
            if not self._is_busy():
                break
            self._let_go(spares_new=_now() < closed + FIRST_REQUEST)
        await self._break_off(HURRIED if self.force_exit else LAST_WORDS)
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_WITHIN if self.force_exit else None):
                await self.lifespan.shutdown()

    async def _looks(self, until: float) -> AsyncIterator[None]:
        """Look now and every moment until then, or until asked twice."""
        while _now() < until and not self.force_exit:
            yield
            await asyncio.sleep(LOOK_EVERY)

    async def _stop_accepting(self, sockets: list[socket.socket]) -> None:
        """Stop accepting: connections already in the queue are served, later ones are refused."""
        for sock in sockets if not self._is_shared else ():
            close_door(sock)
        come = _now() + HANDSHAKES
        async for _ in self._looks(come + 1.0):
            if _now() > come and not any(map(_has_news, sockets)):
                break
        for server in self.servers:
            server.close()
        for sock in sockets:
            sock.close()

    def _is_busy(self) -> bool:
        return bool(self.server_state.connections or self.server_state.tasks or self._drain.runs_more())

    def _let_go(self, *, spares_new: bool) -> None:
        """Close idle connections; busy ones are closed after their response."""
        for connection in list(self.server_state.connections):
            if not isinstance(connection, HttpToolsProtocol):
                cast(LongConnection, connection).end_when_idle()
                continue
            cycle = connection.cycle
            if cycle is not None and not cycle.response_complete:
                cycle.keep_alive = False
                continue
            is_new = cycle is None and spares_new
            is_asking = connection.scope is not None and (cycle is None or cycle.scope is not connection.scope)
            # Closed with unread bytes, it would be reset, and the request in them lost.
            if not (is_new or is_asking or _has_news(connection.transport.get_extra_info("socket"))):
                connection.transport.close()

    async def _break_off(self, within: float) -> None:
        """Cancel what still runs: its client is told, its accounting is closed. Then cut clients that do not read."""
        running = list(self.server_state.tasks)
        if running:
            log.warning("drain_over", broken_off=len(running))
        for task in running:
            task.cancel()
        for _ in range(round(within / A_MOMENT)):  # of the time that this process runs: a stop costs no call its end
            if not self._is_busy():
                break
            self._let_go(spares_new=False)
            await asyncio.sleep(A_MOMENT)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _has_news(sock: socket.socket) -> bool:
    """Whether something waits to be read or accepted."""
    waiting = select.poll()
    waiting.register(sock.fileno(), select.POLLIN)
    return bool(waiting.poll(0))
