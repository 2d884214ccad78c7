# URLs of Redis: which name sentinels or a cluster, and what is said of those that name nothing.

from __future__ import annotations

import pytest

from protocol.serving.redis_url import Servers, read_servers


@pytest.mark.parametrize("url", ["redis://host", "rediss://:secret@host:6380/1", "unix:///run/redis.sock"])
def test_one_server_is_not_several(url: str) -> None:
    """redis-py reads these by itself."""
    assert read_servers(url) is None


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis+sentinel://a/main", Servers((("a", 26379),), "main", "redis://a/0")),
        (
            "rediss+sentinel://u:p%40@a:1,[::1]:2,c/main/3?sentinel_password=x",
            Servers((("a", 1), ("::1", 2), ("c", 26379)), "main", "rediss://u:p%40@a:1/3?sentinel_password=x"),
        ),
        ("redis+cluster://a", Servers((("a", 6379),), None, "redis://a/0")),
        ("redis+cluster://a:1,b/", Servers((("a", 1), ("b", 6379)), None, "redis://a:1/0")),
        (
            "rediss+cluster://:p@[::1]:2/0?ssl_ca_certs=f",
            Servers((("::1", 2),), None, "rediss://:p@[::1]:2/0?ssl_ca_certs=f"),
        ),
    ],
)
def test_sentinels_and_clusters_are_read(url: str, expected: Servers) -> None:
    """Each address with its port, the service of sentinels, and the rest as for one Redis."""
    assert read_servers(url) == expected


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("redis+cluster://:secret@a:1,b:2/1", "redis\\+cluster://host:6379,host:6379"),
        ("redis+cluster://:secret@a:1,", "each server is a HOST or HOST:PORT"),
        ("redis+sentinel://:secret@a:1,b:2", "redis\\+sentinel://host:26379,host:26379/SERVICE/0"),
        ("redis+sentinel://:secret@a:1,b:2/main/x", "redis\\+sentinel://"),
        ("redis+sentinel://:secret@a:one/main", "each server is a HOST or HOST:PORT"),
        ("redis+sentinel://:secret@a:1,/main", "each server is a HOST or HOST:PORT"),
        ("unix+sentinel://:secret@a/main", "expected a URL"),
        ("http://:secret@a/main", "expected a URL"),
        ("secret", "expected a URL"),
    ],
)
def test_what_is_neither_is_refused_without_being_shown(url: str, what: str) -> None:
    """The message says what would be right, and no password."""
    with pytest.raises(ValueError, match=what) as refused:
        read_servers(url)

    assert "secret" not in str(refused.value)
