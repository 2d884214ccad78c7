# The guard: where a callback's URL leads, looked up once, and whether a callback may go there. The sender connects
# to the addresses that were checked and to no others, so that a name cannot point elsewhere a moment later.

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from weakref import WeakValueDictionary

from msgspec import Struct

from gateway.egress.addresses import Network, is_allowed, why_forbidden
from gateway.egress.urls import Address, BadUrl, CallbackUrl, read_url
from protocol.errors import BadRequest

LOOK_UP_WITHIN = 4.0  # seconds
OPENED_FOR_CALLBACKS = "callbacks may not go unless an operator opens its range (callbacks.allow)"
LEAST_PORT = 1024  # below it a public receiver may use 443 alone: no callback talks to a mail server

Resolve = Callable[[str, int, str], Awaitable[Sequence[str]]]  # a name, a port, and the team that asks


class Unreachable(Exception):
    """No callback may or can go there; its message says why. ``may_pass``: a name server did not answer."""

    def __init__(self, reason: str, *, may_pass: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.may_pass = may_pass


class Destination(Struct, frozen=True):
    """A URL and the checked addresses that it leads to."""

    url: CallbackUrl
    addresses: tuple[Address, ...]


class SystemResolver:
    """Looks names up as the system does, each in a thread of its own that the end of the process does not wait for.

    A name server that hangs keeps its threads: ``at_once`` bounds them, and ``of_a_team`` those of one team.
    """

    def __init__(self, at_once: int = 256, of_a_team: int | None = None) -> None:
        self._places = asyncio.Semaphore(at_once)
        self._of_a_team = of_a_team or at_once
        self._shares: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # of teams with look-ups

    async def __call__(self, host: str, port: int, team_id: str = "") -> Sequence[str]:
        """Return the addresses of a name, in the system's order. Raises OSError."""
        share = self._shares.setdefault(team_id, asyncio.Semaphore(self._of_a_team))
        await share.acquire()
        try:
            await self._places.acquire()
        except asyncio.CancelledError:
            share.release()
            raise
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[str]] = loop.create_future()

        def settle(addresses: list[str], error: OSError | None) -> None:
            self._places.release()
            share.release()
            if answer.done():  # no caller waits any more
                return
            if error is None:
                answer.set_result(addresses)
            else:
                answer.set_exception(error)

        def ask() -> None:
            addresses: list[str] = []
            error: OSError | None = None
            try:
                addresses = _look_up(host, port)
            except OSError as exc:
                error = exc
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, addresses, error)

        threading.Thread(target=ask, name="callback-look-up", daemon=True).start()
        return await answer


class Guard:
    """Decides where callbacks may go, or what else ``rule`` names. ``allow``: ranges that are open though they are not
    public."""

    def __init__(
        self, allow: Sequence[Network] = (), resolve: Resolve | None = None, *, rule: str = OPENED_FOR_CALLBACKS
    ) -> None:
        self.allow = tuple(allow)
        self._rule = rule
        self._resolve = resolve or SystemResolver()

    async def find(self, url: CallbackUrl, team_id: str = "") -> Destination:
        """Return where ``url`` leads, every address checked, looked up for a team. Raises Unreachable."""
        addresses = (url.address,) if url.address is not None else await self._addresses(url, team_id)
        for address in addresses:
            kind = why_forbidden(address, self.allow)
            if kind is not None:
                where = "is" if url.address is not None else "leads to"  # which one is not shown to a team
                raise Unreachable(f"{where} {kind} address, where {self._rule}")
            if is_allowed(address, self.allow):
                continue
            if url.scheme != "https":
                raise Unreachable("must be https; http is for addresses in callbacks.allow")
            if url.port != 443 and url.port < LEAST_PORT:
                raise Unreachable(f"names port {url.port}; use 443, or one from {LEAST_PORT}")
        return Destination(url, addresses)

    async def check(self, text: str, param: str) -> str:
        """Return a URL as it may be stored. Raises BadRequest naming ``param``.

        A name that cannot be looked up just now passes: every delivery looks again.
        """
        try:
            url = read_url(text)
            await self.find(url)
        except (BadUrl, Unreachable) as exc:
            if isinstance(exc, Unreachable) and exc.may_pass and url.scheme == "https":
                return url.text
            raise BadRequest(f"'{param}' {exc}.", param=param, code="invalid_callback_url") from None
        return url.text

    async def _addresses(self, url: CallbackUrl, team_id: str) -> tuple[Address, ...]:
        try:
            async with asyncio.timeout(LOOK_UP_WITHIN):
                found = await self._resolve(url.host, url.port, team_id)
            addresses = tuple(map(ip_address, found))
        except TimeoutError:
            raise Unreachable(f"names {url.host}, which could not be looked up in time", may_pass=True) from None
        except socket.gaierror as exc:
            unknown = exc.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
            words = "which does not exist" if unknown else "which could not be looked up"
            raise Unreachable(f"names {url.host}, {words}", may_pass=not unknown) from exc
        except (OSError, ValueError) as exc:
            raise Unreachable(f"names {url.host}, which could not be looked up", may_pass=True) from exc
        if not addresses:
            raise Unreachable(f"names {url.host}, which has no address")
        return addresses


def _look_up(host: str, port: int) -> list[str]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as exc:  # a label of more than 63 characters
        raise socket.gaierror(socket.EAI_NONAME, str(exc)) from exc
    return list(dict.fromkeys(str(each[4][0]) for each in found))
