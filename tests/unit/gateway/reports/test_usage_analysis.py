# What a report may be compared with, and what a name is compared with.

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
from msgspec.structs import replace

from billing.core.money import to_nano
from billing.core.prices import Price
from gateway.core.settings import Settings
from gateway.reports.usage_analysis import alternatives_in, read_analysis
from protocol.errors import BadRequest
from router.catalog.catalog import AutoRoute
from tests.support.house import model, settings_for

DAY = date(2026, 4, 5)


@pytest.fixture
def settings() -> Settings:
    """A house with a small and a large rented model, and one of its own."""
    rented = settings_for("postgresql://x/y", "redis://x", "http://upstream/v1", Path("/nowhere"))
    own = replace(rented.providers["upstream"], name="own", self_hosted=True)
    return replace(
        rented,
        providers=rented.providers | {"own": own},
        models=rented.models | {"llama": model("llama", provider="own")},
        aliases=rented.aliases | {"ours": "llama", "smart": "auto"},
    )


def test_only_commercial_models_are_compared_with(settings: Settings) -> None:
    """A model of our own, a route or an unknown name is refused with those that would do."""
    for said in ("llama", "ours", "auto", "gpt-0"):
        with pytest.raises(BadRequest) as refusal:
            read_analysis({"compare": said}, settings, settings.catalog())
        assert refusal.value.param == "compare"
        assert "There are: large, small." in refusal.value.message


def test_an_alias_means_its_model(settings: Settings) -> None:
    """Callers know models by the names they use."""
    analysis = read_analysis({"compare": "old-name"}, settings, settings.catalog())

    assert analysis is not None and analysis.compared is not None
    assert analysis.compared.name == "large"


def test_nothing_is_analysed_unasked(settings: Settings) -> None:
    """The plain report costs what it always did."""
    assert read_analysis({}, settings, settings.catalog()) is None
    assert read_analysis({"analysis": "false"}, settings, settings.catalog()) is None


def test_each_name_has_its_alternative(settings: Settings) -> None:
    """Automatic routes are compared with their first large model, large models with their route's first small one."""
    prices = {"small": Price(input=to_nano(1), output=to_nano(2)), "large": Price(input=to_nano(5), output=to_nano(20))}
    models = settings.models | {name: replace(settings.models[name], price=price) for name, price in prices.items()}
    second = AutoRoute(small=("llama",), large=("large",), quality=0.9)
    catalog = replace(settings, models=models, auto=settings.auto | {"second": second}).catalog()

    found = {each.asked: each for each in alternatives_in(catalog, DAY)}

    assert {name for name, each in found.items() if each.is_auto} == {"auto", "smart", "second"}
    assert {name for name, each in found.items() if not each.is_auto} == {"large", "old-name"}
    assert found["auto"].price == found["smart"].price == prices["large"]
    assert (found["large"].price, found["large"].quality) == (prices["small"], 0.5)
