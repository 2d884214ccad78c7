# Which addresses a callback may reach: public ones, and those of `callbacks.allow`. The lists are IANA's registries of
# special-purpose addresses (RFC 6890 and its successors), written out because the standard library's idea of "global"
# differs between Python versions.

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from gateway.egress.urls import Address

Network = IPv4Network | IPv6Network

SPECIAL: dict[str, tuple[Network, ...]] = {
    kind: tuple(ip_network(each) for each in ranges.split())
    for kind, ranges in {
        "an unspecified": "0.0.0.0/8 ::/128",
        "a loopback": "127.0.0.0/8 ::1/128",
        "a private": "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 fc00::/7 fec0::/10",
        "a carrier's shared": "100.64.0.0/10",
        "a link-local": "169.254.0.0/16 fe80::/10",
        "a multicast": "224.0.0.0/4 ff00::/8",
        "an IPv4 in IPv6": "::ffff:0:0/96 ::/96 64:ff9b::/96 64:ff9b:1::/48 2002::/16 2001::/32",
        "a reserved": "192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 "
        "240.0.0.0/4 2001::/23 2001:db8::/32 3fff::/20 5f00::/16 100::/64",
    }.items()
}
# Where clouds tell machines their secrets; one of them looks like any public address.
METADATA = tuple(
    map(ip_address, ("169.254.169.254", "169.254.170.2", "168.63.129.16", "100.100.100.200", "fd00:ec2::254"))
)
PUBLIC_IPV6 = ip_network("2000::/3")  # all that has been given out


def why_forbidden(address: Address, allow: Sequence[Network]) -> str | None:
    """Return what kind of address this is if no callback may go there, or None if one may.

    ``allow`` opens its ranges; a metadata address only by a range that holds it alone.
    """
    scope = getattr(address, "scope_id", None)
    if scope is not None:
        return "a link-local"
    if address in METADATA:
        alone = ip_network(address)
        return None if alone in allow else "a cloud's metadata"
    if is_allowed(address, allow):
        return None
    for kind, ranges in SPECIAL.items():
        if any(address in each for each in ranges):
            return kind
    return "a reserved" if address.version == 6 and address not in PUBLIC_IPV6 else None


def is_allowed(address: Address, allow: Sequence[Network]) -> bool:
    """Tell whether the operator opened this very address. An IPv4 range says nothing about IPv6."""
    return any(address in each for each in allow)
