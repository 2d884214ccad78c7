# Where Redis is, as a URL: one server; sentinels, which know the primary of several; or servers of a cluster.

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import urlsplit

ONE = ("redis", "rediss", "unix")
SENTINEL, CLUSTER = "sentinel", "cluster"
PORTS = {SENTINEL: 26379, CLUSTER: 6379}
EXAMPLE = (
    "redis://host:6379/0, redis+sentinel://host:26379,host:26379/SERVICE/0, or redis+cluster://host:6379,host:6379"
)


class Servers(NamedTuple):
    """What a URL says of several servers: ``redis+sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/SERVICE/DB``, or
    ``redis+cluster://USER:PASSWORD@HOST:PORT,HOST:PORT``."""

    addresses: tuple[tuple[str, int], ...]
    service: str | None  # the name under which sentinels watch it; None: a cluster
    url: str  # as of one Redis at the first address, for all else it says: user, password, database, TLS


def read_servers(url: str) -> Servers | None:
    """Return what a URL says of several servers; ``None`` where it is that of one.

    Raises ValueError for what is neither; its message shows nothing of the URL, which may hold a password.
    """
    scheme, _, rest = url.partition("://")
    if scheme in ONE:
        return None
    plain, _, kind = scheme.partition("+")
    place = r"/([^/?#]+)(?:/(\d*))?" if kind == SENTINEL else r"(?:/(0?))?()"
    found = re.fullmatch(rf"(?:([^/?#]*)@)?([^/?#@]+){place}(?:\?([^#]*))?", rest)
    if kind not in PORTS or plain not in ("redis", "rediss") or found is None:
        raise ValueError(f"expected a URL such as {EXAMPLE}, special characters in a password written as %XX")
    user, hosts, service, database, query = found.groups()
    try:
        parts = [urlsplit(f"//{host}") for host in hosts.split(",")]
        addresses = tuple((part.hostname or "", part.port or PORTS[kind]) for part in parts)
    except ValueError:
        addresses = (("", 0),)
    if not all(host for host, _ in addresses):
        raise ValueError(f"each server is a HOST or HOST:PORT, with commas between them: {EXAMPLE}")
    before = "" if user is None else f"{user}@"
    after = "" if query is None else f"?{query}"
    first = f"{plain}://{before}{hosts.split(',')[0]}/{database or 0}{after}"
    return Servers(addresses, service if kind == SENTINEL else None, first)
