# Keys are used as their providers' own limits allow: by what the headers of answers say.

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gateway.core.settings import ProviderSettings
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.resilience.keys import Gauge, KeyRing, TargetAway
from gateway.upstreams.wire.limits import Left, read_limits
from router.catalog.targets import Endpoint, Target
from tests.support.house import model

HERE = Endpoint("here", "http://here/v1")
TARGET = Target(model("small", "one"), HERE)
NOW = 1775397600.0  # 2026-04-05T14:00:00Z
EMPTY, SOME = Left(False, 0, 60, 30.0), Left(False, 20, 60, 20.0)


def ring(*keys: str) -> KeyRing:
    return KeyRing(
        ProviderRegistry({"one": ProviderSettings(name="one", format="openai", api_keys=keys, endpoints=(HERE,))})
    )


def dealt(keys: KeyRing, calls: int, now: float, tokens: int = 1) -> list[str | None]:
    return [keys.deal(TARGET, now, tokens) for _ in range(calls)]


@pytest.mark.parametrize(
    ("headers", "left"),
    [
        (
            {
                "x-ratelimit-limit-requests": "60",
                "x-ratelimit-remaining-requests": "30",
                "x-ratelimit-reset-requests": "30s",
                "x-ratelimit-limit-tokens": "150000",
                "x-ratelimit-remaining-tokens": "0",
                "x-ratelimit-reset-tokens": "1m0.5s",
            },
            [Left(False, 30, 60, 30.0), Left(True, 0, 150000, 60.5)],
        ),
        (
            {
                "anthropic-ratelimit-requests-limit": "50",
                "anthropic-ratelimit-requests-remaining": "0",
                "anthropic-ratelimit-requests-reset": "2026-04-05T14:00:12Z",
                "anthropic-ratelimit-input-tokens-limit": "30000",
                "anthropic-ratelimit-input-tokens-remaining": "15000",
                "anthropic-ratelimit-input-tokens-reset": "2026-04-05T14:00:30+00:00",
            },
            [Left(False, 0, 50, 12.0), Left(True, 15000, 30000, 30.0)],
        ),
        ({"x-ratelimit-remaining-requests": "3", "x-ratelimit-reset-requests": "120ms"}, [Left(False, 3, None, 0.12)]),
        ({"x-ratelimit-remaining-requests": "3", "x-ratelimit-reset-requests": "7"}, [Left(False, 3, None, 7.0)]),
        ({"x-ratelimit-remaining-requests": "-1", "x-ratelimit-reset-requests": "6m0s"}, []),
        ({"x-ratelimit-remaining-requests": "0"}, []),  # nobody knows until when
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "soon"}, []),
        ({"anthropic-ratelimit-requests-remaining": "0", "anthropic-ratelimit-requests-reset": "soon"}, []),
        (
            {
                "x-ratelimit-limit-requests": "60",
                "x-ratelimit-remaining-requests": "31",
                "x-ratelimit-reset-requests": "29s",
            },
            [],
        ),
        ({}, None),
    ],
)
def test_headers_say_what_is_left(headers: Mapping[str, str], left: list[Left] | None) -> None:
    """Durations and moments, in either dialect; nonsense is not said, nor is what there is plenty of."""
    assert read_limits(headers, NOW) == left


def test_an_empty_key_is_not_asked_until_it_has_room() -> None:
    """Sixty in thirty seconds are one in half a second: then it is asked again, once."""
    keys = ring("a")
    keys.hear(TARGET, "a", [EMPTY], now=100.0)

    with pytest.raises(TargetAway) as away:
        keys.deal(TARGET, 100.1, 1)
    assert (away.value.is_busy, away.value.is_limit) == (True, True)
    assert away.value.retry_in == pytest.approx(0.4)
    assert keys.why_away(TARGET, 100.1) is not None
    assert dealt(keys, 1, 100.6) == ["a"]
    with pytest.raises(TargetAway):
        keys.deal(TARGET, 100.7, 1)


def test_a_limit_of_unknown_size_is_empty_until_its_reset() -> None:
    """Nobody knows how fast it fills up."""
    keys = ring("a")
    keys.hear(TARGET, "a", [Left(False, 0, None, 12.0)], now=100.0)

    with pytest.raises(TargetAway):
        keys.deal(TARGET, 111.9, 1)
    assert dealt(keys, 3, 112.1) == ["a", "a", "a"]


def test_the_key_with_room_is_preferred() -> None:
    """While one has room the other is spared, also once it might have a little again, until its limit is whole."""
    keys = ring("a", "b")
    keys.hear(TARGET, "a", [EMPTY], now=100.0)
    keys.hear(TARGET, "b", [SOME], now=100.0)

    assert set(dealt(keys, 9, 110.0)) == {"b"}
    assert set(dealt(keys, 9, 130.1)) == {"a", "b"}


def test_what_is_asked_counts_until_more_is_heard() -> None:
    """Three were left: calls that are on their way have them, and the fourth goes elsewhere, then nowhere."""
    keys = ring("a", "b")
    for key in ("a", "b"):
        keys.hear(TARGET, key, [Left(False, 3, 60, 57.0)], now=100.0)

    assert sorted(filter(None, dealt(keys, 6, 100.0))) == ["a", "a", "a", "b", "b", "b"]
    with pytest.raises(TargetAway):
        keys.deal(TARGET, 100.0, 1)
    keys.hear(TARGET, "b", [], now=101.5)
    assert "b" in dealt(keys, 2, 101.6)


def test_a_long_prompt_goes_to_the_key_with_tokens_left() -> None:
    """What fits nowhere by our estimate is asked all the same: the provider may count otherwise."""
    keys = ring("a", "b")
    keys.hear(TARGET, "a", [SOME, Left(True, 900, 90_000, 60.0)], now=100.0)
    keys.hear(TARGET, "b", [SOME, Left(True, 80_000, 90_000, 6.0)], now=100.0)

    assert set(dealt(keys, 6, 100.0, tokens=10_000)) == {"b"}
    assert dealt(keys, 1, 100.0, tokens=90_000) in (["a"], ["b"])


def test_counting_tokens_takes_nothing() -> None:
    """It counts under limits of its own."""
    keys = ring("a")
    keys.hear(TARGET, "a", [Left(False, 1, 60, 59.0)], now=100.0)
    for _ in range(5):
        assert keys.deal(TARGET, 100.0) == "a"

    assert dealt(keys, 1, 100.0) == ["a"]


def test_a_reset_by_an_admin_forgets_what_was_told() -> None:
    """Whoever raised a limit at the provider need not wait for its next answer."""
    keys = ring("a")
    keys.hear(TARGET, "a", [EMPTY], now=100.0)
    keys.use_again(TARGET)

    assert dealt(keys, 9, 100.0) == ["a"] * 9


def test_a_limit_is_whole_in_the_end_whatever_was_asked() -> None:
    """No rounding keeps a key away for longer than its reset."""
    gauge = Gauge(Left(True, 10, 90_000, 60.0), 100.0)
    gauge.take(1_000_000)

    assert 100.0 < gauge.empty_until(100.0) <= 160.0
