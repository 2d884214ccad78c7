# Which key goes where, also while the configuration changes.

from __future__ import annotations

from gateway.core.settings import ProviderSettings
from gateway.upstreams.registry import ProviderRegistry
from router.catalog.targets import Endpoint, Target
from tests.support.house import model

HERE, THERE = Endpoint("here", "http://here/v1"), Endpoint("there", "http://there/v1")


def provider(name: str, keys: tuple[str, ...], *endpoints: Endpoint) -> dict[str, ProviderSettings]:
    return {name: ProviderSettings(name=name, format="openai", api_keys=keys, endpoints=endpoints)}


def target(name: str, endpoint: Endpoint) -> Target:
    return Target(model("small", name), endpoint)


def test_keys_are_dealt_in_turn() -> None:
    """Each key of a provider in its turn, over all of its endpoints."""
    registry = ProviderRegistry(provider("one", ("a", "b"), HERE, THERE))

    assert [registry.next_key_at(target("one", place)) for place in (HERE, HERE, THERE)] == ["a", "b", "a"]


def test_a_key_never_goes_where_it_does_not_belong() -> None:
    """A provider that moved: calls that began before still reach the old place with the old key, others the new one."""
    before = ProviderRegistry(provider("one", ("old",), HERE))
    after = ProviderRegistry(provider("one", ("new",), THERE), before)

    assert after.next_key_at(target("one", HERE)) == "old"
    assert after.next_key_at(target("one", THERE)) == "new"
    assert after.next_key("one") == "new"


def test_a_changed_key_counts_at_once_where_the_place_is_the_same() -> None:
    """Who replaces a key that leaked wants nobody to use it any more."""
    before = ProviderRegistry(provider("one", ("leaked",), HERE))
    after = ProviderRegistry(provider("one", ("fresh",), HERE), before)

    assert after.next_key_at(target("one", HERE)) == "fresh"


def test_what_is_gone_is_known_until_it_is_back() -> None:
    """A provider that is removed serves what runs there; named again, it is as the file says then."""
    first = ProviderRegistry(provider("one", ("old",), HERE))
    second = ProviderRegistry(provider("two", ("key",), THERE), first)
    third = ProviderRegistry(provider("two", ("key",), THERE), second)
    last = ProviderRegistry(provider("one", ("again",), HERE), third)

    assert third.settings_at(target("one", HERE)).api_keys == ("old",)
    assert list(third.names()) == ["two"]
    assert last.next_key_at(target("one", HERE)) == "again"
    assert last.next_key_at(target("two", THERE)) == "key"
