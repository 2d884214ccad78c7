# Which addresses callbacks may reach.

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest

from gateway.egress.addresses import why_forbidden


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.216.34", "192.0.1.1", "223.255.255.255", "2606:4700::1111"])
def test_public_addresses_are_open(address: str) -> None:
    """Whatever anybody may reach."""
    assert why_forbidden(ip_address(address), ()) is None


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("0.0.0.0", "unspecified"),
        ("0.1.2.3", "unspecified"),
        ("::", "unspecified"),
        ("127.0.0.1", "loopback"),
        ("127.255.255.254", "loopback"),
        ("::1", "loopback"),
        ("10.1.2.3", "private"),
        ("172.16.0.1", "private"),
        ("172.31.255.255", "private"),
        ("192.168.1.1", "private"),
        ("fd12:3456::1", "private"),
        ("fec0::1", "private"),
        ("100.64.0.1", "carrier"),
        ("100.127.255.255", "carrier"),
        ("169.254.1.1", "link-local"),
        ("fe80::1", "link-local"),
        ("fe80::1%2", "link-local"),
        ("224.0.0.1", "multicast"),
        ("ff02::1", "multicast"),
        ("255.255.255.255", "reserved"),
        ("240.0.0.1", "reserved"),
        ("192.0.0.8", "reserved"),
        ("192.0.2.1", "reserved"),
        ("198.18.0.1", "reserved"),
        ("203.0.113.9", "reserved"),
        ("2001:db8::1", "reserved"),
        ("4000::1", "reserved"),
        ("100::1", "reserved"),
        ("169.254.169.254", "metadata"),
        ("169.254.170.2", "metadata"),
        ("168.63.129.16", "metadata"),
        ("100.100.100.200", "metadata"),
        ("fd00:ec2::254", "metadata"),
        ("::ffff:8.8.8.8", "IPv4 in IPv6"),
        ("::ffff:127.0.0.1", "IPv4 in IPv6"),
        ("::127.0.0.1", "IPv4 in IPv6"),
        ("64:ff9b::7f00:1", "IPv4 in IPv6"),
        ("64:ff9b:1::7f00:1", "IPv4 in IPv6"),
        ("2002:7f00:1::", "IPv4 in IPv6"),
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", "IPv4 in IPv6"),
    ],
)
def test_every_other_address_is_closed(address: str, kind: str) -> None:
    """And one is told which kind it is."""
    assert kind in str(why_forbidden(ip_address(address), ()))


def test_the_operator_opens_ranges() -> None:
    """What callbacks.allow holds is open, and nothing beside it; an IPv4 range says nothing of IPv6."""
    allow = (ip_network("10.20.0.0/16"), ip_network("fd00::/8"))

    assert why_forbidden(ip_address("10.20.3.4"), allow) is None
    assert why_forbidden(ip_address("fd12::1"), allow) is None
    assert why_forbidden(ip_address("10.21.0.1"), allow) is not None
    assert why_forbidden(ip_address("::ffff:10.20.3.4"), allow) is not None


def test_metadata_opens_by_its_own_name_alone() -> None:
    """A wide range does not open by accident what gives away the machine."""
    address = ip_address("169.254.169.254")

    assert why_forbidden(address, [ip_network("169.254.0.0/16"), ip_network("0.0.0.0/0")]) is not None
    assert why_forbidden(ip_address("fd00:ec2::254"), [ip_network("fd00::/8")]) is not None
    assert why_forbidden(address, [ip_network("169.254.169.254/32")]) is None
