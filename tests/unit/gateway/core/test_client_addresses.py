# Who a request comes from: the socket says, or a proxy that is trusted to.

from __future__ import annotations

from ipaddress import ip_network

import pytest

from gateway.core.client_addresses import client_of, network_of

PROXIES = (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))


def scope(peer: str, *forwarded: str) -> dict[str, object]:
    return {"client": (peer, 1234), "headers": [(b"x-forwarded-for", value.encode()) for value in forwarded]}


@pytest.mark.parametrize("peer", ["127.0.0.1", "::1", "203.0.113.9"])
def test_what_no_trusted_proxy_says_is_not_believed(peer: str) -> None:
    """A program on this machine is none by itself."""
    assert client_of(scope(peer, "198.51.100.1"), PROXIES) == peer
    assert client_of(scope(peer, "198.51.100.1"), ()) == peer


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [
        (["198.51.100.1"], "198.51.100.1"),
        (["198.51.100.1:4711"], "198.51.100.1"),
        (["[2001:db8::7]:4711"], "2001:db8::7"),
        (["2001:db8::7"], "2001:db8::7"),
        (["192.0.2.1, 198.51.100.1, 10.2.0.1"], "198.51.100.1"),  # the first is what the client made up
        (["192.0.2.1", "198.51.100.1"], "198.51.100.1"),
        (["10.3.0.1, 10.2.0.1"], "10.3.0.1"),
        (["nonsense"], "10.0.0.1"),
        (["198.51.100.1, unknown"], "10.0.0.1"),
        ([], "10.0.0.1"),
    ],
)
def test_a_trusted_proxy_names_the_nearest_that_is_none(forwarded: list[str], client: str) -> None:
    """Each proxy writes the address that it was called from behind what it was told."""
    assert client_of(scope("10.0.0.1", *forwarded), PROXIES) == client
    assert client_of(scope("::ffff:10.0.0.1", *forwarded), PROXIES) in (client, f"::ffff:{client}")


def test_an_endless_list_of_proxies_costs_no_more_than_a_short_one() -> None:
    """Only its end is looked at."""
    assert client_of(scope("10.0.0.1", "10.9.9.9," * 25_000 + "198.51.100.1"), PROXIES) == "198.51.100.1"
    assert client_of(scope("10.0.0.1", "198.51.100.1," + "10.9.9.9," * 25_000 + "10.9.9.9"), PROXIES) == "10.9.9.9"


def test_a_client_of_ipv6_is_its_network() -> None:
    """It has as many addresses as it likes; an IPv4 address is one, whichever way it is written."""
    assert network_of("2001:db8:1:2:3:4:5:6") == network_of("2001:db8:1:2::9") == "2001:db8:1:2::/64"
    assert network_of("::ffff:192.0.2.1") == network_of("192.0.2.1") == "192.0.2.1"
    assert network_of("") == ""
