# A gateway over HTTP, as commands ask it: JSON in and out, streams of events, and whatever goes wrong on the way there
# in words that say what to do. The standard library's client: a command starts sooner without a larger one.

from __future__ import annotations

import http.client
import json
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from typing import IO, Any
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from gateway.core.version import VERSION
from gateway.terminal.address import LOOPBACK, Address, find_address
from gateway.terminal.printing import fail
from protocol.sse import EventReader

REFUSED, NOT_ACCEPTED, NOT_REACHED = 1, 3, 4  # exit statuses; 2 is a command line that makes no sense
TIMEOUT = 60.0  # seconds of silence, the connection's beginning among them
PIECE = 1 << 16  # bytes
PAGE = 1000  # lines of a list that one request asks for, the most

_DECODER = msgspec.json.Decoder(float_hook=Decimal)  # money keeps its digits
_ENCODER = msgspec.json.Encoder(decimal_format="number")


class GatewayFault(Exception):
    """What a command was not given, and what to do. ``status``: to exit with. ``may_pass``: asking again may help."""

    def __init__(self, words: str, status: int = REFUSED, *, may_pass: bool = False) -> None:
        super().__init__(words)
        self.status, self.may_pass = status, may_pass


@contextmanager
def remote_gateway(url: str | None, key: str | None) -> Iterator[RemoteGateway]:
    """Give the gateway that a command line means; a fault inside of the block is said, and ends the command."""
    try:
        yield RemoteGateway(find_address(url, key))
    except GatewayFault as exc:
        fail(str(exc), exc.status)


class RemoteGateway:
    """One gateway, asked one thing at a time. Every method raises GatewayFault."""

    def __init__(self, address: Address) -> None:
        self.address = address
        # No redirects: a key is for the address that it was given for.
        is_near = urlsplit(address.url).hostname in LOOPBACK
        by_proxy = urllib.request.ProxyHandler({} if is_near else None)
        self._opener = urllib.request.build_opener(_NoRedirects, by_proxy)

    def get(self, path: str, **query: object) -> Any:
        """Return what a GET answers; a parameter that is None is left out."""
        said = {name: value for name, value in query.items() if value is not None}
        return self._whole(urllib.request.Request(self._url(path, said), headers=self._headers(path)))

    def pages(self, path: str, **query: object) -> Any:
        """Return a list whole, page by page: each after the last ``id`` or ``key_id`` of the one before."""
        page = whole = self.get(path, limit=PAGE, **query)
        while page["has_more"]:
            last = page["data"][-1]
            page = self.get(path, limit=PAGE, **query, after=last.get("id") or last["key_id"])
            whole = page | {"data": whole["data"] + page["data"]}
        return whole

    def post(self, path: str, body: object = None, **headers: str) -> Any:
        """Return what a POST answers."""
        return self._whole(self._request("POST", path, body, headers))

    def patch(self, path: str, body: object) -> Any:
        """Return what a PATCH answers."""
        return self._whole(self._request("PATCH", path, body, {}))

    def delete(self, path: str, query: Mapping[str, object] | None = None, **headers: str) -> Any:
        """Return what a DELETE answers."""
        return self._whole(self._request("DELETE", path, None, headers, query))

    def send(self, path: str, body: Iterable[bytes], length: int, content_type: str) -> Any:
        """Return what a POST of a long body answers, which is never in memory as a whole."""
        headers = self._headers(path) | {"content-type": content_type, "content-length": str(length)}
        return self._whole(urllib.request.Request(self._url(path), data=body, headers=headers))

    def events(self, path: str, body: object) -> Iterator[bytes]:
        """Yield the data of each event of a streamed answer, but the mark of its end."""
        reader = EventReader()
        with self._open(self._request("POST", path, body, {"accept": "text/event-stream"})) as answer:
            for piece in self._pieces(answer):
                yield from (event.data for event in reader.feed(piece) if event.data != b"[DONE]")

    def content(self, path: str, **query: object) -> Iterator[bytes]:
        """Yield an answer's body piece by piece."""
        with self._open(urllib.request.Request(self._url(path, query), headers=self._headers(path))) as answer:
            yield from self._pieces(answer)

    def _request(
        self,
        method: str,
        path: str,
        body: object,
        more: Mapping[str, str],
        query: Mapping[str, object] | None = None,
    ) -> urllib.request.Request:
        data = b"" if body is None else _ENCODER.encode(body)
        headers = self._headers(path) | {"content-type": "application/json"} | dict(more)
        return urllib.request.Request(self._url(path, query), data=data, headers=headers, method=method)

    def _url(self, path: str, query: Mapping[str, object] | None = None) -> str:
        return f"{self.address.url}{quote(path)}" + (f"?{urlencode(query)}" if query else "")

    def _headers(self, path: str) -> dict[str, str]:
        is_admins = path.startswith("/admin")
        if is_admins and self.address.admin_key is None:
            raise GatewayFault(
                "this needs an admin key, and the one that is known is a team's: `tollgate login` with an admin key",
                NOT_ACCEPTED,
            )
        first, second = self.address.team_key, self.address.admin_key
        key = second if is_admins or first is None else first
        return {"authorization": f"Bearer {key}", "accept": "application/json", "user-agent": f"tollgate/{VERSION}"}

    def _whole(self, request: urllib.request.Request) -> Any:
        with self._open(request) as answer:
            content = b"".join(self._pieces(answer))
        try:
            return _DECODER.decode(content)
        except (msgspec.DecodeError, ValueError) as exc:
            raise GatewayFault(self._no_gateway(), NOT_REACHED) from exc

    def _pieces(self, answer: IO[bytes]) -> Iterator[bytes]:
        read = getattr(answer, "read1", answer.read)
        try:
            while piece := read(PIECE):
                yield piece
            if getattr(answer, "length", None):
                raise http.client.IncompleteRead(b"", answer.length)  # type: ignore[attr-defined]
        except (OSError, http.client.HTTPException) as exc:
            raise GatewayFault(
                f"the answer of {self.address.url} broke off: {exc or type(exc).__name__}", may_pass=True
            ) from exc

    def _open(self, request: urllib.request.Request) -> Any:
        try:
            return self._opener.open(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as exc:
            with exc:
                raise self._refusal(exc) from exc
        except urllib.error.URLError as exc:
            reason = exc.reason if isinstance(exc.reason, Exception) else OSError(str(exc.reason))
            raise GatewayFault(self._not_reached(reason), NOT_REACHED, may_pass=True) from exc
        except (OSError, http.client.HTTPException, ValueError) as exc:
            raise GatewayFault(self._not_reached(exc), NOT_REACHED, may_pass=True) from exc

    def _refusal(self, exc: urllib.error.HTTPError) -> GatewayFault:
        """Return what an answer of status 300 and above means."""
        url = self.address.url
        may_pass = exc.code == 429 or exc.code >= 500
        if exc.code < 400:
            return GatewayFault(f"{url} leads on to {exc.headers.get('location')}: give that as --url", NOT_REACHED)
        try:
            error = json.loads(exc.read(PIECE))["error"]
            words, code = str(error["message"]), error.get("code")
        except (ValueError, KeyError, TypeError, AttributeError, OSError):
            if exc.headers.get("x-request-id") is None:
                return GatewayFault(f"{self._no_gateway()} It answered {exc.code}.", NOT_REACHED, may_pass=may_pass)
            words, code = f"it answered {exc.code}", None
        if exc.code == 401:
            new = "`tollgate keys create --team …` makes one, `tollgate login` keeps it"
            return GatewayFault(f"{url} does not accept the key (from {self.address.source}); {new}", NOT_ACCEPTED)
        request_id, later = exc.headers.get("x-request-id"), exc.headers.get("retry-after")
        after = f" Again in {later} s." if later else ""
        named = " ".join(filter(None, (code, f"request {request_id}" if request_id else None)))
        status = NOT_ACCEPTED if exc.code == 403 else REFUSED
        return GatewayFault(f"{words}{after} ({named or exc.code})", status, may_pass=may_pass)

    def _no_gateway(self) -> str:
        return f"{self.address.url} answers, but not as a Tollgate gateway: is it the right URL, without a path?"

    def _not_reached(self, exc: Exception) -> str:
        url = self.address.url
        match exc:
            case ssl.SSLCertVerificationError():
                own = "where your company has an authority of its own, SSL_CERT_FILE=ca.pem names it"
                return f"{url}: its certificate is not trusted ({exc.verify_message}); {own}"
            case ssl.SSLError():
                return f"{url} does not speak TLS there ({exc.reason}): is it an http:// URL, or another port?"
            case socket.gaierror():
                return f"{url}: there is no such host; is the name right, and are you on the network that knows it?"
            case ConnectionRefusedError():
                return f"{url}: nothing listens there (from {self.address.source}); does the gateway run?"
            case TimeoutError():
                return f"{url} did not answer within {TIMEOUT:.0f} s: is there a firewall between, or is it overloaded?"
            case http.client.HTTPException() | ConnectionResetError():
                return f"{url} does not speak HTTP there: is it an https:// URL, or another port?"
            case _:
                return f"{url} cannot be reached: {exc}"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None
