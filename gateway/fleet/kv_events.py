# What replicas of our engine tell of their prefix caches, as it comes: KV events over ZeroMQ in vLLM's format. A gap is
# asked for again; what cannot be had again, or comes from a replica that was away, is forgotten, and all is asked for
# until an answer comes.

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Container, Mapping
from contextlib import suppress
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Any
from urllib.parse import urlsplit

import msgspec
import structlog
from msgspec import Raw, Struct

from gateway.config.weakness import why_no_service
from protocol.serving.announcements import KvEventsAt
from router.cached_prompts import ON_DEVICE, ON_HOST, CachedPrompts

END_OF_REPLAY = -1
REPLAY_PATIENCE = 5.0  # seconds until the next batch that was asked for again,
REPLAY_LASTS = 15.0  # and until the last
ASKS_EVERY = 10.0  # seconds after which what did not come is asked for again, and where none comes, what may be lost
WAITING = 100_000  # batches that may wait to be read
AT_ONCE = 64  # batches and events that are read before other work of the process goes on
LONGEST = 32 * 1024 * 1024  # bytes of a message: more than all that a replica may have is told in
UNREADABLE = (ValueError, OverflowError, RecursionError, msgspec.MsgspecError)

Networks = Collection[IPv4Network | IPv6Network]

log = structlog.get_logger()


class _Stored(Struct, frozen=True, tag="BlockStored"):
    medium: str | None = None
    prompt_marks: tuple[tuple[int, int], ...] = ()


class _Removed(Struct, frozen=True, tag="BlockRemoved"):
    block_hashes: tuple[int | bytes, ...]
    medium: str | None = None


class _Cleared(Struct, frozen=True, tag="AllBlocksCleared"):
    pass


class _StoredInOrder(Struct, frozen=True, tag="BlockStored", array_like=True):
    block_hashes: Raw
    parent_block_hash: Raw
    token_ids: Raw
    block_size: int
    lora_id: Raw = Raw(b"\xc0")
    medium: str | None = None
    lora_name: Raw = Raw(b"\xc0")
    extra_keys: Raw = Raw(b"\xc0")
    group_idx: Raw = Raw(b"\xc0")
    prompt_marks: tuple[tuple[int, int], ...] = ()


class _RemovedInOrder(Struct, frozen=True, tag="BlockRemoved", array_like=True):
    block_hashes: tuple[int | bytes, ...]
    medium: str | None = None


class _ClearedInOrder(Struct, frozen=True, tag="AllBlocksCleared", array_like=True):
    pass


class Batch(Struct, frozen=True, array_like=True):
    """What one message holds."""

    at: float  # unix seconds
    events: tuple[Raw, ...]


_batch = msgspec.msgpack.Decoder(Batch).decode
_map = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared).decode
_array = msgspec.msgpack.Decoder(_StoredInOrder | _RemovedInOrder | _ClearedInOrder).decode
_ARRAYS = frozenset(range(0x90, 0xA0)) | {0xDC, 0xDD}  # first bytes


def apply(event: Raw, cached: CachedPrompts) -> None:
    """Note what an event tells, a map or an array. Raises ``msgspec.MsgspecError`` for one that is none."""
    match _array(event) if memoryview(event)[0] in _ARRAYS else _map(event):
        case _Stored(prompt_marks=marks, medium=medium) | _StoredInOrder(prompt_marks=marks, medium=medium):
            cached.store(marks, _place(medium))
        case _Removed(blocks, medium) | _RemovedInOrder(blocks, medium):
            cached.remove((block for block in blocks if isinstance(block, int)), _place(medium))
        case _:
            cached.clear()


def _place(medium: str | None) -> int:
    return ON_DEVICE if medium is None or medium == "GPU" else ON_HOST


class KvSubscriber:
    """Follows one replica's events until it is closed."""

    def __init__(self, context: Any, endpoint: str, replay_endpoint: str | None, cached: CachedPrompts) -> None:
        """``context``: a ``zmq.asyncio.Context``. Raises ``ValueError`` for an address that is none."""
        self._context, self._replay_endpoint = context, replay_endpoint
        self._cached = cached
        self._next: int | None = None  # number of the next batch; None: nothing is known
        self._latest = 0.0  # when the latest one was sent (unix seconds)
        self._is_whole = False  # all is known that could be had
        self._asks_at = -math.inf  # no earlier (monotonic seconds), since the last time was in vain
        self._read = 0
        self._replays: Any = None
        self._events = self._connected("SUB", endpoint)
        self._events.subscribe(b"")
        self._task = asyncio.create_task(self._follow(endpoint))

    def close(self) -> None:
        """Follow no more. What is known stays as it is."""
        self._task.cancel()
        self._events.close()
        self._close_replays()

    async def _follow(self, endpoint: str) -> None:
        is_unread = False
        while True:
            try:
                if not self._is_whole:
                    await self._replay(0)
                try:
                    async with asyncio.timeout(ASKS_EVERY):
                        _, number, payload = await self._events.recv_multipart()
                except TimeoutError:  # the last ones may be lost: no later one has come that would show a gap
                    await self._replay(self._next or 0)
                    continue
                await self._take(int.from_bytes(number, "big"), _batch(payload))
                is_unread = False
            except UNREADABLE as exc:
                if not is_unread:
                    log.warning("kv_events_unread", endpoint=endpoint, error=str(exc))
                is_unread = True
                self._close_replays()  # what is left of an answer is not to be taken for the next one
                self._start_over()
                self._ask_later()
                await self._let_others()

    async def _take(self, number: int, batch: Batch) -> None:
        """Apply a batch, and before it those that are missing."""
        if self._next is not None and number < self._next:
            if batch.at <= self._latest:
                await self._let_others()
                return  # it came with those that were asked for
            self._start_over()  # as the replica did
        if number > (self._next or 0):
            await self._replay(self._next or 0)
            if self._next is not None and number < self._next:
                return
        if number != self._next:  # what was in between is lost, and what it removed
            self._start_over()
            self._ask_later()
        await self._apply(number, batch)

    async def _replay(self, first: int) -> None:
        """Ask for all batches from a number on, as far back as the replica has them, and apply them, unless it failed
        to answer a moment ago: batches that come are read meanwhile."""
        if self._replay_endpoint is None or time.monotonic() < self._asks_at:
            return
        if self._replays is None:
            self._replays = self._connected("DEALER", self._replay_endpoint)
        await self._replays.send_multipart((b"", first.to_bytes(8, "big")))
        expected, is_begun = first, False
        try:
            async with asyncio.timeout(REPLAY_LASTS):
                while True:
                    async with asyncio.timeout(REPLAY_PATIENCE):
                        _, told, payload = await self._replays.recv_multipart()
                    is_begun = True
                    if (number := int.from_bytes(told, "big", signed=True)) == END_OF_REPLAY:
                        break
                    if number != expected:
                        self._cached.clear()
                    await self._apply(number, _batch(payload))
                    expected = number + 1
        except TimeoutError:
            self._close_replays()  # what comes too late is not to be taken for another answer
            self._ask_later()
            if is_begun:  # of what it told, it may have removed some since
                self._start_over()
            return
        if self._next is None:
            self._next = expected
        if first == 0:
            self._is_whole = self._next == expected
        if self._next != expected:  # it keeps less than it told
            self._ask_later()

    async def _apply(self, number: int, batch: Batch) -> None:
        for event in batch.events:
            apply(event, self._cached)
            await self._let_others()
        self._next, self._latest = number + 1, batch.at
        await self._let_others()

    async def _let_others(self) -> None:
        self._read += 1
        if self._read % AT_ONCE == 0:
            await asyncio.sleep(0)

    def _start_over(self) -> None:
        self._cached.clear()
        self._next, self._is_whole = None, False

    def _ask_later(self) -> None:
        if (now := time.monotonic()) >= self._asks_at:
            self._asks_at = now + ASKS_EVERY

    def _connected(self, kind: str, endpoint: str) -> Any:
        import zmq

        socket = None
        try:
            socket = self._context.socket(getattr(zmq, kind))
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, WAITING)
            socket.setsockopt(zmq.MAXMSGSIZE, LONGEST)
            socket.connect(endpoint)
        except zmq.ZMQError as exc:  # or there is no descriptor left
            if socket is not None:
                socket.close()
            raise ValueError(f"{endpoint[:100]}: {exc}") from exc
        return socket

    def _close_replays(self) -> None:
        if self._replays is not None:
            self._replays.close()
            self._replays = None


class KvEvents:
    """What is cached at each replica that tells, by its address."""

    def __init__(self) -> None:
        # By address: where a replica tells, by which start, and where else than at itself it may.
        self._told: dict[str, tuple[KvEventsAt | None, str, Networks]] = {}
        self._followed: dict[str, KvSubscriber] = {}
        self._cached: dict[str, CachedPrompts] = {}
        self._context: Any = None

    @property
    def cached(self) -> Mapping[str, CachedPrompts]:
        """What is cached where, by the base URLs of replicas that tell."""
        return self._cached

    def note(self, base_url: str, instance_id: str, told: KvEventsAt | None, networks: Networks = ()) -> None:
        """Follow a replica from where it says that it tells its events; ``None``: nowhere. That is at the host where it
        is asked, or in one of ``networks``: it is no replica's to say where else a gateway connects to."""
        if self._told.get(base_url) == (told, instance_id, networks):
            return
        self.lose(base_url)
        self._told[base_url] = told, instance_id, networks
        if told is None:
            return
        host, cached = urlsplit(base_url).hostname or "", CachedPrompts()
        endpoint = _reached(told.endpoint, host)
        replays = None if told.replay_endpoint is None else _reached(told.replay_endpoint, host)
        try:
            for each in filter(None, (endpoint, replays)):
                _check(each, host, networks)
            self._followed[base_url] = KvSubscriber(self._opened(), endpoint, replays, cached)
        except ImportError:
            log.warning("kv_events_not_followed", endpoint=base_url, reason="pip install pyzmq")
        except ValueError as exc:
            log.warning("kv_events_not_followed", endpoint=base_url, reason=str(exc))
        else:
            self._cached[base_url] = cached

    def lose(self, base_url: str) -> None:
        """Forget a replica that does not answer any more, or that the configuration lacks."""
        self._told.pop(base_url, None)
        if (subscriber := self._followed.pop(base_url, None)) is not None:
            subscriber.close()
            del self._cached[base_url]

    def keep(self, base_urls: Container[str]) -> None:
        """Forget all other replicas."""
        for base_url in [each for each in self._told if each not in base_urls]:
            self.lose(base_url)

    def close(self) -> None:
        """Follow none any more."""
        self.keep(())
        if self._context is not None:
            self._context.destroy(linger=0)

    def _opened(self) -> Any:
        if self._context is None:
            from zmq.asyncio import Context

            self._context = Context()
        return self._context


def _check(endpoint: str, host: str, networks: Networks) -> None:
    """Raise ``ValueError`` for an endpoint that is neither at a replica's host nor in one of the networks."""
    parts = urlsplit(endpoint)
    told = parts.hostname or ""
    if parts.scheme != "tcp" or parts.port is None:
        raise ValueError(f"{endpoint[:100]}: not of the form tcp://HOST:PORT")
    places = []
    for name in (told, host):
        with suppress(ValueError):
            places.append(ip_address("127.0.0.1" if name == "localhost" else name))
    is_here = len(places) == 2 and (places[0] == places[1] or all(place.is_loopback for place in places))
    if told == host or is_here:
        return
    if why_no_service(told) is not None or not any(place in one for place in places[:1] for one in networks):
        words = f"neither at {host}, where the replica is asked, nor in fleet.networks"
        raise ValueError(f"{endpoint[:100]}: {words}; --kv-events-config takes tcp://*:PORT")


def _reached(endpoint: str, host: str) -> str:
    """Return where a replica's endpoint is for us, which it may know by "all my addresses" alone."""
    for everywhere in ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"):
        if endpoint.startswith(everywhere):
            return f"tcp://{f'[{host}]' if ':' in host else host}:{endpoint.removeprefix(everywhere)}"
    return endpoint
