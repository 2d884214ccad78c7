# URLs of Redis: which name sentinels, and what is said of those that name nothing.

from __future__ import annotations

import pytest

from protocol.serving.redis_url import Sentinels, read_sentinels


@pytest.mark.parametrize("url", ["redis://host", "rediss://:secret@host:6380/1", "unix:///run/redis.sock"])
def test_one_server_is_no_sentinel(url: str) -> None:
    """redis-py reads these by itself."""
    assert read_sentinels(url) is None


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis+sentinel://a/main", Sentinels((("a", 26379),), "main", "redis://a/0")),
        (
            "rediss+sentinel://u:p%40@a:1,[::1]:2,c/main/3?sentinel_password=x",
            Sentinels((("a", 1), ("::1", 2), ("c", 26379)), "main", "rediss://u:p%40@a:1/3?sentinel_password=x"),
        ),
    ],
)
def test_sentinels_are_read(url: str, expected: Sentinels) -> None:
    """Each address with its port, the service, and the rest as for one Redis."""
    assert read_sentinels(url) == expected


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("redis+cluster://:secret@a:1,b:2", "Redis Cluster is not supported"),
        ("redis+sentinel://:secret@a:1,b:2", "redis\\+sentinel://host:26379,host:26379/SERVICE/0"),
        ("redis+sentinel://:secret@a:1,b:2/main/x", "redis\\+sentinel://"),
        ("redis+sentinel://:secret@a:one/main", "each sentinel is a HOST or HOST:PORT"),
        ("redis+sentinel://:secret@a:1,/main", "each sentinel is a HOST or HOST:PORT"),
        ("unix+sentinel://:secret@a/main", "expected a URL"),
        ("http://:secret@a/main", "expected a URL"),
        ("secret", "expected a URL"),
    ],
)
def test_what_is_neither_is_refused_without_being_shown(url: str, what: str) -> None:
    """The message says what would be right, and no password."""
    with pytest.raises(ValueError, match=what) as refused:
        read_sentinels(url)

    assert "secret" not in str(refused.value)
