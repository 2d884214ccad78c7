# Where a connection or a request comes from: the address at the socket's other end, or what a trusted proxy there says
# in x-forwarded-for. Nothing else is trusted, nor from this machine: any program on it can write the header.

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any

Address = IPv4Address | IPv6Address
Networks = tuple[IPv4Network | IPv6Network, ...]

CLIENT_PREFIX = 64  # bits of an IPv6 address: what one client has to itself
LONGEST_FORWARDED = 1024  # characters of x-forwarded-for that are looked at, from its end: a dozen proxies


def client_of(scope: Mapping[str, Any], proxies: Networks) -> str:
    """Return the address of a request's client: the nearest one that is no trusted proxy."""
    peer = scope["client"][0] if scope["client"] else ""
    if not proxies:
        return peer
    told = b",".join(value for name, value in scope["headers"] if name == b"x-forwarded-for")
    if len(told) > LONGEST_FORWARDED:
        told = told[-LONGEST_FORWARDED:].partition(b",")[2]
    return _nearest_stranger(peer, told, proxies)


def network_of(address: str) -> str:
    """Return what stands for all addresses of one client: an IPv6 client has a whole network of them."""
    if ":" not in address:
        return address
    match _address_in(address):
        case IPv6Address() as found:
            return str(IPv6Network((int(found) >> (128 - CLIENT_PREFIX) << (128 - CLIENT_PREFIX), CLIENT_PREFIX)))
        case None:
            return address
        case found:
            return str(found)


def is_among(address: str, networks: Networks) -> bool:
    """Whether an address lies in one of the networks."""
    found = _address_in(address)
    return found is not None and any(found in network for network in networks)


@lru_cache(4096)
def _nearest_stranger(peer: str, told: bytes, proxies: Networks) -> str:
    nearest = peer
    for hop in reversed(told.decode("latin-1").split(",")):
        if not is_among(nearest, proxies) or (found := _address_in(_without_port(hop.strip()))) is None:
            break
        nearest = str(found)
    return nearest


def _without_port(hop: str) -> str:
    if hop.startswith("["):
        return hop[1:].partition("]")[0]
    return hop.partition(":")[0] if hop.count(":") == 1 else hop


def _address_in(text: str) -> Address | None:
    """Return the address, an IPv4 one also where a socket for both kinds writes it as IPv6."""
    try:
        found = ip_address(text)
    except ValueError:
        return None
    return (isinstance(found, IPv6Address) and found.ipv4_mapped) or found
