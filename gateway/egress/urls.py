# What a callback's URL may look like. One narrow grammar, so that no two parsers can read a URL differently: what it
# does not know, such as a user's name, a zone id or 0x7f.1, is refused. Where the URL leads is destinations.py's
# business. And whether others on the way can read what is said to the URL of an identity provider.

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from msgspec import Struct
from yarl import URL

LONGEST_URL = 2048  # characters
USUAL_PORTS = {"https": 443, "http": 80}

Address = IPv4Address | IPv6Address

_SHAPE = re.compile(
    r"(?P<scheme>https?)://(?P<host>[a-z0-9_-]+(?:\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<rest>[/?][!\"$-\[\]-~]*)?",  # printable, but neither # nor a backslash
    re.IGNORECASE,
)
# The last label of a name is never a number: whatever looks like one is a way to write an IPv4 address.
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


class BadUrl(ValueError):
    """A URL that no callback can go to; its message says why."""


class CallbackUrl(Struct, frozen=True):
    """A URL in its one form: scheme and host in lower case, no usual port, no fragment."""

    text: str
    scheme: str
    host: str  # without brackets
    port: int
    address: Address | None  # the host, if it is an address

    @property
    def parsed(self) -> URL:
        """Return the URL for the HTTP client, which must not read it in its own way."""
        return URL(self.text, encoded=True)

    @property
    def shown(self) -> str:
        """Return what logs may show: paths and queries often hold a secret."""
        return self.text[: len(self.text) - len(self.parsed.raw_path_qs)] + "/…"

    def __repr__(self) -> str:
        """Return the URL as logs may show it: tracebacks and tests that fail may print it, too."""
        return f"CallbackUrl({self.shown})"


def read_url(text: str, longest: int = LONGEST_URL) -> CallbackUrl:
    """Return what ``text`` of up to ``longest`` characters says. Raises BadUrl."""
    if len(text) > longest:
        raise BadUrl(f"is longer than {longest} characters")
    found = _SHAPE.fullmatch(text)
    if found is None:
        raise BadUrl(_what_is_wrong(text))
    scheme, host = found["scheme"].lower(), found["host"].lower()
    port = int(found["port"]) if found["port"] else USUAL_PORTS[scheme]
    if not 0 < port < 65536:
        raise BadUrl("names a port that does not exist")
    address = _read_address(host)
    shown_port = "" if port == USUAL_PORTS[scheme] else f":{port}"
    host = host if address is None else str(address)
    authority = f"[{host}]" if isinstance(address, IPv6Address) else host
    rest = found["rest"] or "/"
    whole = f"{scheme}://{authority}{shown_port}{'/' if rest[0] == '?' else ''}{rest}"
    return CallbackUrl(whole, scheme, host, port, address)


def is_private(url: str) -> bool:
    """Return whether what is said to a URL stays between the two: https, or this machine."""
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in ("localhost", "127.0.0.1", "::1"))


def _read_address(host: str) -> Address | None:
    """Return the address that ``host`` is, or None for a name. Raises BadUrl for a disguised address."""
    if not host.startswith("[") and _NUMBER.fullmatch(host.rpartition(".")[2]) is None:
        return None
    try:
        return ip_address(host.strip("[]"))
    except ValueError:
        raise BadUrl(
            "has a host that is neither a name nor a plain address such as 192.0.2.1 or [2001:db8::1]"
        ) from None


def _what_is_wrong(text: str) -> str:
    authority = re.split(r"[/?#\\]", text.partition("://")[2], maxsplit=1)[0]
    if not re.match(r"https?://", text, re.IGNORECASE):
        return "must begin with https://"
    if "@" in authority:
        return "must not hold a user name or password"
    if not text.isascii():
        return "must be ASCII: write an international name in its xn-- form, and percent-encode the rest"
    if "#" in text:
        return "must not have a fragment"
    if "\\" in text:
        return "must not hold a backslash"
    if authority.endswith(".") or ".:" in authority:
        return "has a host that ends in a dot"
    return "is not a plain URL such as https://hooks.example.com/tollgate"
