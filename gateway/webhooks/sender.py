# The only module that speaks to receivers: one POST, to the checked addresses alone, within ten seconds whatever the
# receiver does. aiohttp's errors become a DeliveryResult here.

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from ipaddress import ip_address

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from gateway.egress.destinations import Destination, Guard, Unreachable
from gateway.egress.urls import Address, BadUrl, read_url
from gateway.outbox.schedule import DeliveryResult

SEND_WITHIN = 10.0  # seconds, look-up, connection and answer together
READ_AT_MOST = 4096  # bytes of an answer, which are thrown away: they let a polite receiver end in peace
READ_WITHIN = 1.0  # seconds
USER_AGENT = "Tollgate"


class Sender:
    """Sends signed events. ``tls`` is for receivers under an authority of one's own; else the system's are trusted.

    Neither redirects are followed nor proxies used, and no cookie is kept.
    """

    def __init__(self, guard: Guard, tls: ssl.SSLContext | None = None) -> None:
        self._guard = guard
        self._tls = tls or ssl.create_default_context()

    async def send(self, url: str, headers: Mapping[str, str], body: bytes, now: float) -> DeliveryResult:
        """Post ``body`` and return how it went; ``now`` is unix seconds. Never raises but to be cancelled."""
        try:
            async with asyncio.timeout(SEND_WITHIN) as deadline:
                destination = await self._guard.find(read_url(url))
                return await self._post(destination, headers, body, now, deadline)
        except (BadUrl, Unreachable) as exc:
            return DeliveryResult(error=f"The URL {exc}.")
        except TimeoutError:
            return DeliveryResult(error=f"No answer within {SEND_WITHIN:.0f} seconds.")
        except aiohttp.ClientConnectorCertificateError as exc:
            return DeliveryResult(error=f"The receiver's certificate is refused: {exc.certificate_error}"[:500])
        except aiohttp.ClientConnectorError as exc:
            return DeliveryResult(error=f"No connection: {exc.os_error.strerror or exc.os_error}."[:500])
        except aiohttp.ServerDisconnectedError:
            return DeliveryResult(error="The receiver closed the connection without an answer.")
        except aiohttp.ClientResponseError:
            return DeliveryResult(error="The answer is not HTTP.")
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            return DeliveryResult(error=f"The connection broke: {type(exc).__name__}.")

    async def _post(
        self, destination: Destination, headers: Mapping[str, str], body: bytes, now: float, deadline: asyncio.Timeout
    ) -> DeliveryResult:
        pinned = _Pinned(destination.addresses)
        connector = aiohttp.TCPConnector(
            resolver=pinned, use_dns_cache=False, force_close=True, ssl=self._tls, socket_factory=pinned.open_socket
        )
        more = {"content-type": "application/json", "user-agent": USER_AGENT, "accept-encoding": "identity"}
        async with aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, trust_env=False
        ) as session:
            async with session.post(
                destination.url.parsed, data=body, headers={**headers, **more}, allow_redirects=False
            ) as response:
                deadline.reschedule(None)  # answered: a body that drips changes nothing any more
                result = _read(response, now)
                if result.is_delivered:
                    await _end_politely(response)
                return result


class _Pinned(AbstractResolver):
    """Answers with the checked addresses, and opens a socket for no other."""

    def __init__(self, addresses: tuple[Address, ...]) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return what was looked up before."""
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST,
            )
            for address in self._addresses
        ]

    def open_socket(self, info: aiohttp.AddrInfoType) -> socket.socket:
        """Return a socket for a connection that is about to be made: the last look at where it goes."""
        family, type_, proto, _, place = info
        if ip_address(str(place[0])) not in self._addresses:
            raise OSError(f"{place[0]} is not an address that was checked")
        return socket.socket(family, type_, proto)

    async def close(self) -> None:
        """Nothing is open."""


def _read(response: aiohttp.ClientResponse, now: float) -> DeliveryResult:
    status = response.status
    if 300 <= status < 400:
        return DeliveryResult(status=status, error="The receiver redirects; redirects are not followed.")
    error = None if 200 <= status < 300 else f"The receiver answered {status}."
    return DeliveryResult(
        status=status, error=error, retry_after=_retry_after(response.headers.get("retry-after"), now)
    )


def _retry_after(said: str | None, now: float) -> float | None:
    """Return seconds from a retry-after header, a number or a date; None for anything else."""
    if said is None:
        return None
    if said.isascii() and said.isdigit() and len(said) < 10:
        return float(said)
    try:
        return max(0.0, parsedate_to_datetime(said).timestamp() - now)
    except (ValueError, TypeError, OverflowError):
        return None


async def _end_politely(response: aiohttp.ClientResponse) -> None:
    """Read a little of the answer; however that goes, it is delivered."""
    try:
        async with asyncio.timeout(READ_WITHIN):
            await response.content.read(READ_AT_MOST)
    except (aiohttp.ClientError, OSError, ValueError):
        pass
