# Which key goes where, also while the configuration changes.

from __future__ import annotations

from typing import cast

import pytest
from msgspec.structs import replace

from gateway.core.principals import CompanyKeys, Team
from gateway.core.settings import ProviderSettings
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.provider_batches import ProviderBatches, digest_of
from gateway.upstreams.registry import MOST_RETIRED, ProviderRegistry
from gateway.upstreams.team_keys import variants_of
from gateway.upstreams.wire.base import UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamFailure
from router.catalog.targets import Endpoint, Target, TeamKeys
from tests.support.clock import SetClock
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


async def test_a_batch_that_lies_where_its_provider_was_is_asked_about_with_no_key_of_the_new_place() -> None:
    """It outlives its process, and what that knew of the old place; with the place as it was, another key will do."""
    none = cast(UpstreamClient, None)
    moved = ProviderBatches(ProviderRegistry(provider("one", ("new",), THERE)), none, SetClock())
    gone = ProviderBatches(ProviderRegistry({}), none, SetClock())
    stays = ProviderBatches(ProviderRegistry(provider("one", ("new",), HERE)), none, SetClock())
    for batches in (moved, gone):
        with pytest.raises(UpstreamFailure):
            await batches.place_of(target("one", HERE), digest_of("old"))

    assert (await stays.place_of(target("one", HERE), digest_of("old"))).api_key == "new"


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


def test_places_that_were_left_long_ago_are_forgotten() -> None:
    """Replicas come and go for months: the latest that went are known, whatever their number was."""
    registry = ProviderRegistry(provider("one", ("key",), HERE))
    went = [Endpoint("there", f"http://there-{number}/v1") for number in range(MOST_RETIRED + 2)]
    many = ProviderRegistry(provider("one", ("key",), HERE, *went), registry)
    none = ProviderRegistry(provider("one", ("key",), THERE), many)

    assert none.stands_at(target("one", went[-1])) and not none.stands_at(target("one", went[0]))
    assert len(none._retired) == MOST_RETIRED


def test_a_request_with_a_teams_own_key_is_dressed_for_its_account() -> None:
    """It has connections of its own, and no header that names the deployment's account."""
    said = {"openai-organization": "org-ours", "x-goog-user-project": "ours", "x-title": "ours"}
    registry = ProviderRegistry({"one": replace(provider("one", ("a",), HERE)["one"], headers=said)})
    common, own = target("one", HERE), replace(target("one", HERE), own=TeamKeys("search"))
    built = UpstreamRequest("POST", HERE.base_url, {}, b"")
    dressed = [registry.dress(built, one) for one in (common, own)]

    assert [sorted(one.headers) for one in dressed] == [
        ["openai-organization", "x-goog-user-project", "x-title"],
        ["x-title"],
    ]
    assert [one.party for one in dressed] == ["", "search"]


CHOICES = {  # which keys calls go with, by what a team chose, whether it has one, and whether the deployment has
    ("otherwise", True, True): ["own"],
    ("otherwise", False, True): ["company's"],
    ("fallback", True, True): ["own", "company's"],
    ("fallback", False, True): ["company's"],
    ("never", True, True): ["own"],
    ("never", False, True): [],
    ("otherwise", False, False): [],
    ("fallback", True, False): ["own"],
}


@pytest.mark.parametrize(("choice", "has_own", "has_companys"), CHOICES)
def test_a_team_chooses_whose_keys_its_calls_go_with(choice: CompanyKeys, *, has_own: bool, has_companys: bool) -> None:
    """The page docs/provider-keys.md has the table."""
    keys = ("a",) if has_companys else ()
    named = replace(provider("one", keys, HERE)["one"], team_keys={"search": ("sk-own",)} if has_own else {})
    registry = ProviderRegistry({"one": named})
    team = Team(id="search", name="", company_keys=choice)
    found = list(variants_of(target("one", HERE), team, registry))

    told = ["company's" if one.own is None else "own" for one in found]
    assert told == CHOICES[choice, has_own, has_companys]
    assert [registry.keys_at(one) for one in found] == [("sk-own",) if one == "own" else keys for one in told]
