# URLs of callbacks have one reading, or none.

from __future__ import annotations

import pytest

from gateway.egress.urls import BadUrl, read_url


@pytest.mark.parametrize(
    ("text", "whole", "host", "port"),
    [
        ("https://hooks.example.com", "https://hooks.example.com/", "hooks.example.com", 443),
        ("HTTPS://Hooks.Example.COM:443/A?b=C", "https://hooks.example.com/A?b=C", "hooks.example.com", 443),
        ("https://hooks.example.com?b", "https://hooks.example.com/?b", "hooks.example.com", 443),
        ("http://10.0.0.1:80/x", "http://10.0.0.1/x", "10.0.0.1", 80),
        ("https://[2001:DB8:0:0::1]:8443/x", "https://[2001:db8::1]:8443/x", "2001:db8::1", 8443),
        ("https://xn--mnchen-3ya.example/%2e%2e/x", "https://xn--mnchen-3ya.example/%2e%2e/x", None, 443),
        ("https://web_1:8443/a@b:c//", "https://web_1:8443/a@b:c//", "web_1", 8443),
    ],
)
def test_a_url_has_one_form(text: str, whole: str, host: str | None, port: int) -> None:
    """Case and usual ports do not matter; path and query stay as they were written, for the client too."""
    url = read_url(text)

    assert (url.text, url.port) == (whole, port)
    assert host is None or url.host == host
    assert str(url.parsed) == whole
    assert (url.parsed.raw_host, url.parsed.port) == (url.host, url.port)
    assert read_url(whole) == url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hooks.example.com",
        "//hooks.example.com",
        "ftp://hooks.example.com",
        "file:///etc/passwd",
        "gopher://127.0.0.1:6379/_FLUSHALL",
        "https:hooks.example.com",
        "https:///path",
        "https://",
        "https://user@hooks.example.com/",
        "https://user:secret@hooks.example.com/",
        "https://hooks.example.com@127.0.0.1/",
        "https://hooks.example.com\\@127.0.0.1/",
        "https://127.0.0.1#@hooks.example.com/",
        "https://hooks.example.com#x",
        "https://hooks.example.com/#x",
        "https://hooks.example.com/a b",
        "https://hooks.example.com/a\\b",
        " https://hooks.example.com/",
        "https://hooks.example.com/\n",
        "https://hooks.example.com/\r\nhost: other",
        "https://hooks.example.com\t/",
        "https://hooks.example.com\x00.evil.example/",
        "https://hooks.example.com./",
        "https://localhost./",
        "https://.example.com/",
        "https://hooks..example.com/",
        "https://hooks.example.com:/",
        "https://hooks.example.com:0/",
        "https://hooks.example.com:65536/",
        "https://hooks.example.com:443:80/",
        "https://hooks.example.com:0x1bb/",
        "https://hooks%2eexample.com/",
        "https://127.0.0.1%2f@hooks.example.com/",
        "https://münchen.example/",
        "https://①②⑦.⓪.⓪.①/",
        "https://127。0。0。1/",
        "https://[::1/",
        "https://::1/",
        "https://[::1]x/",
        "https://[fe80::1%25eth0]/",
        "https://[fe80::1%eth0]/",
        "https://[v1.fe80]/",
        "https://[127.0.0.1]:99999/",
        "https://" + "a" * 2048,
    ],
)
def test_what_parsers_could_read_in_two_ways_is_refused(text: str) -> None:
    """Users, fragments, escapes, dots at the end, zones and other alphabets in the host: none is needed."""
    with pytest.raises(BadUrl) as refusal:
        read_url(text)

    assert str(refusal.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ftp://hooks.example.com", "must begin with https://"),
        ("https://user@hooks.example.com/", "user name"),
        ("https://münchen.example/", "xn--"),
        ("https://hooks.example.com/#x", "fragment"),
        ("https://hooks.example.com/a\\b", "backslash"),
        ("https://hooks.example.com./", "ends in a dot"),
        ("https://hooks.example.com.:443/", "ends in a dot"),
        ("https://hooks..example.com/", "not a plain URL"),
        ("https://hooks.example.com/a@b. c.", "not a plain URL"),  # that is its path
        ("https://hooks.example.com:0/", "port that does not exist"),
        ("https://a/" + "b" * 2039, "longer than 2048"),
    ],
)
def test_a_refusal_says_what_is_wrong(text: str, why: str) -> None:
    """Whoever wrote the URL can mend it."""
    with pytest.raises(BadUrl, match=why):
        read_url(text)


def test_the_longest_url_is_read() -> None:
    """All of 2,048 characters."""
    assert len(read_url("https://a/" + "b" * 2038).text) == 2048


@pytest.mark.parametrize(
    "host", ["2130706433", "0x7f000001", "0x7f.1", "017700000001", "127.1", "127.0.1", "0177.0.0.1", "1.2.3.4.5", "0x"]
)
def test_an_address_in_disguise_is_refused(host: str) -> None:
    """What a resolver would read as a number is no name, and only four decimals are an address."""
    with pytest.raises(BadUrl, match="neither a name nor a plain address"):
        read_url(f"https://{host}/")


def test_logs_see_no_path() -> None:
    """Paths and queries of webhooks are often secret."""
    assert read_url("https://hooks.example.com:8443/T0/B1/secret?key=1").shown == "https://hooks.example.com:8443/…"
