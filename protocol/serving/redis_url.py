# Where Redis is, as a URL: one server, or sentinels, which know the primary of several.

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import urlsplit

ONE = ("redis", "rediss", "unix")
SENTINEL = "+sentinel"
PORT = 26379  # of a sentinel
EXAMPLE = "redis://host:6379/0, or redis+sentinel://host:26379,host:26379/SERVICE/0"


class Sentinels(NamedTuple):
    """What a URL says of a Redis behind sentinels: ``redis+sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/SERVICE/DB``."""

    addresses: tuple[tuple[str, int], ...]
    service: str  # the name under which they watch it
    url: str  # as of one Redis at the first address, for all else it says: user, password, database, TLS


def read_sentinels(url: str) -> Sentinels | None:
    """Return what a URL says of sentinels; ``None`` where it is that of one server.

    Raises ValueError for what is neither; its message shows nothing of the URL, which may hold a password.
    """
    scheme, _, rest = url.partition("://")
    if scheme in ONE:
        return None
    if "cluster" in scheme:
        raise ValueError(f"Redis Cluster is not supported: give one primary, {EXAMPLE}")
    plain = scheme.removesuffix(SENTINEL)
    found = re.fullmatch(r"(?:([^/?#]*)@)?([^/?#@]+)/([^/?#]+)(?:/(\d*))?(?:\?([^#]*))?", rest)
    if scheme == plain or plain not in ("redis", "rediss") or found is None:
        raise ValueError(f"expected a URL such as {EXAMPLE}, special characters in a password written as %XX")
    user, hosts, service, database, query = found.groups()
    try:
        parts = [urlsplit(f"//{host}") for host in hosts.split(",")]
        addresses = tuple((part.hostname or "", part.port or PORT) for part in parts)
    except ValueError:
        addresses = (("", 0),)
    if not all(host for host, _ in addresses):
        raise ValueError(f"each sentinel is a HOST or HOST:PORT, with commas between them: {EXAMPLE}")
    before = "" if user is None else f"{user}@"
    after = "" if query is None else f"?{query}"
    return Sentinels(addresses, service, f"{plain}://{before}{hosts.split(',')[0]}/{database or 0}{after}")
