# Totals of providers beside invoices: what is read of them, and what the difference is.

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from msgspec.structs import replace

from billing.core.money import to_nano
from billing.ledger.comparison import Use
from billing.ledger.statements import Totals
from gateway.reports.provider_totals import providers_view, read_invoices
from protocol.errors import BadRequest
from router.catalog.catalog import Catalog
from tests.support.house import model, settings_for


@pytest.fixture
def catalog() -> Catalog:
    """Two models of one provider, and one of another."""
    models = {"small": model("small", "one"), "large": model("large", "one"), "other": model("other", "two")}
    settings = settings_for("postgresql://x/y", "redis://x", "http://upstream/v1", Path("/nowhere"))
    return replace(settings, models=models, auto={}, aliases={}).catalog()


def use(name: str | None, usd: str) -> Use:
    return Use(groups=(name,), totals=Totals(requests=1, input_tokens=10, cost_nanousd=to_nano(usd)))


def test_a_providers_models_stand_beside_its_invoice(catalog: Catalog) -> None:
    """Its models add up, what is left of models that are gone is told apart, and the difference is the invoice's."""
    uses = [use("small", "1.50"), use("large", "8.25"), use("gone", "3"), use(None, "-0.5")]
    one, two, gone = providers_view(uses, catalog, read_invoices("one:10.00, two:4", catalog))["providers"]

    assert (one["provider"], one["requests"], one["cost_usd_exact"]) == ("one", 2, "9.75")
    assert (one["invoice_usd"], one["difference_usd"]) == (Decimal(10), Decimal("0.25"))
    assert one["difference_percent"] == Decimal("2.50")
    assert (two["provider"], two["cost_usd"], two["difference_usd"], two["difference_percent"]) == ("two", 0, 4, 100)
    assert (gone["provider"], gone["cost_usd_exact"], "invoice_usd" in gone) == (None, "2.50", False)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ("three:1", "providers with models are one, two"),
        ("1234.56", "is PROVIDER:USD"),
        ("one:1,one:2", "names one twice"),
        ("one:dear", "such as 1234.56"),
        ("one:", "such as 1234.56"),
        ("one:nan", "such as 1234.56"),
        ("one:1e99", "at most"),
        ("one:0.0000000001", "nine places"),
    ],
)
def test_a_wrong_invoice_says_what_would_be_right(catalog: Catalog, said: str, says: str) -> None:
    """Names, amounts and places, in the error's words."""
    with pytest.raises(BadRequest) as refusal:
        read_invoices(said, catalog)

    assert says in refusal.value.message
    assert refusal.value.param == "invoice"


def test_an_invoice_of_nothing_has_no_percentage(catalog: Catalog) -> None:
    """A difference is no share of zero; a credit note is a negative invoice."""
    (free,) = providers_view([use("other", "1")], catalog, read_invoices("two:0", catalog))["providers"]
    (credit,) = providers_view([], catalog, read_invoices("two:-5", catalog))["providers"]

    assert (free["difference_usd"], free["difference_percent"]) == (-1, None)
    assert (credit["invoice_usd"], credit["difference_usd"]) == (-5, -5)
