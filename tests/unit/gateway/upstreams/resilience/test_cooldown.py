# What is left alone for a while, and how gateways agree on it.

from __future__ import annotations

from gateway.upstreams.resilience.cooldown import Aside, SetAside, at_provider, at_target


def test_it_ends_by_itself_and_the_longest_counts() -> None:
    """The later end of two wins, and at that moment the thing is used again."""
    asides = SetAside()
    asides.put("a", Aside(10.0, "rate_limited"))
    asides.put("a", Aside(5.0, "rate_limited"))

    assert asides.find("a", 9.9) is not None
    assert asides.find("a", 10.0) is None


def test_gateways_agree_without_losing_what_is_news() -> None:
    """What was said is known to all; what came meanwhile, or was taken back meanwhile, is not overruled."""
    asides = SetAside()
    asides.put("old", Aside(10.0, "rate_limited"))
    asides.put("gone", Aside(10.0, "rate_limited"))
    asides.put("more", Aside(10.0, "rate_limited"))
    told = {name: asides.find(name, 0.0) for name in asides.news}
    asides.put("more", Aside(30.0, "refused_key"))
    asides.put("fresh", Aside(20.0, "rate_limited"))
    asides.forget(["gone"])
    asides.agree({name: Aside(10.0, "x") for name in ("old", "gone", "more", "theirs")}, told)

    assert sorted(asides.names()) == ["fresh", "more", "old", "theirs"]
    assert asides.find("more", 20.0) == Aside(30.0, "refused_key")
    assert asides.news == {"fresh", "gone", "more"}


def test_names_tell_nothing_of_a_key() -> None:
    """Names go to Redis and into logs."""
    key = "sk-very-secret"

    assert "secret" not in at_target("target", key) + at_provider("provider", key)
    assert at_target("target", key) != at_target("target", "sk-other")
