# What is left alone for a while, and how gateways agree on it.

from __future__ import annotations

from gateway.upstreams.resilience.cooldown import Cooldown, Cooldowns, at_provider, at_target
from router.catalog.targets import Endpoint, Target, TeamKeys
from tests.support.house import model


def test_it_ends_by_itself_and_the_longest_counts() -> None:
    """The later end of two wins, and at that moment the thing is used again."""
    cooldowns = Cooldowns()
    cooldowns.put("a", Cooldown(10.0, "rate_limited"))
    cooldowns.put("a", Cooldown(5.0, "rate_limited"))

    assert cooldowns.find("a", 9.9) is not None
    assert cooldowns.find("a", 10.0) is None


def test_gateways_agree_without_losing_what_is_news() -> None:
    """What was said is known to all; what came meanwhile, or was taken back meanwhile, is not overruled."""
    cooldowns = Cooldowns()
    cooldowns.put("old", Cooldown(10.0, "rate_limited"))
    cooldowns.put("gone", Cooldown(10.0, "rate_limited"))
    cooldowns.put("more", Cooldown(10.0, "rate_limited"))
    told = {name: cooldowns.find(name, 0.0) for name in cooldowns.news}
    cooldowns.put("more", Cooldown(30.0, "refused_key"))
    cooldowns.put("fresh", Cooldown(20.0, "rate_limited"))
    cooldowns.forget(["gone"])
    cooldowns.agree({name: Cooldown(10.0, "x") for name in ("old", "gone", "more", "theirs")}, told)

    assert sorted(cooldowns.names()) == ["fresh", "more", "old", "theirs"]
    assert cooldowns.find("more", 20.0) == Cooldown(30.0, "refused_key")
    assert cooldowns.news == {"fresh", "gone", "more"}


def test_names_tell_nothing_of_a_key() -> None:
    """Names go to Redis and into logs."""
    key, target = "sk-very-secret", Target(model("small"), Endpoint("us", "http://here/v1"))

    assert "secret" not in at_target(target, key) + at_provider(target, key)
    assert at_target(target, key) != at_target(target, "sk-other")


def test_a_key_of_a_team_rests_by_its_teams_name_and_is_no_others_business() -> None:
    """The same key in two hands has two names, and what rests for one team alone is nothing to look at for others."""
    place = Endpoint("us", "http://here/v1")
    common, mine, theirs = (Target(model("small"), place, own) for own in (None, TeamKeys("mine"), TeamKeys("theirs")))
    names = {at_provider(one, "sk-same") for one in (common, mine, theirs)}
    cooldowns = Cooldowns()
    cooldowns.put(at_provider(mine, "sk-same"), Cooldown(9.0, "refused_key"))
    has_common = [cooldowns.has_common]
    cooldowns.put(at_provider(common, "sk-same"), Cooldown(9.0, "refused_key"))
    has_common.append(cooldowns.has_common)
    cooldowns.forget([at_provider(common, "sk-same")])

    assert len(names) == 3
    assert [*has_common, cooldowns.has_common, bool(cooldowns)] == [False, True, False, True]
