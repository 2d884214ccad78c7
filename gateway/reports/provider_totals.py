# What each provider's models cost in all, and beside it the amount of an invoice where one is given: the last look of
# month's end. Sums are those of the report's models, corrections included, so the two agree.

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from billing.core.money import NANO, to_nano
from billing.ledger.comparison import Use
from billing.ledger.statements import Totals
from gateway.accounts.serializers import cost_view, dollars, shown
from gateway.reports.usage_report import COUNTS
from protocol.errors import invalid_value
from router.catalog.catalog import Catalog

MOST_USD = 10**9
IN_JSON_ALONE = "stands beside a provider's total, which the CSV has no line for: ask for JSON, or leave it out"
PERCENT = Decimal("0.01")  # places of a difference

Invoices = Mapping[str, int]  # nano-dollars, by provider


def read_invoices(said: str | None, catalog: Catalog) -> Invoices:
    """Return the invoices in ``openai:1234.56,anthropic:99``. Raises BadRequest."""
    invoices: dict[str, int] = {}
    known = {model.provider for model in catalog.models.values()}
    for one in said.split(",") if said is not None else ():
        provider, _, amount = one.strip().rpartition(":")
        if provider not in known:
            raise invalid_value("invoice", f"is PROVIDER:USD; providers with models are {', '.join(sorted(known))}")
        if provider in invoices:
            raise invalid_value("invoice", f"names {provider} twice: add its invoices up")
        invoices[provider] = _amount(amount, provider)
    return invoices


def providers_view(by_model: Iterable[Use], catalog: Catalog, invoices: Invoices) -> dict[str, Any]:
    """Return a line for each provider: of models that are not in the catalogue any more one together, ``null``."""
    sums: dict[str | None, Totals] = dict.fromkeys(invoices, Totals())
    for use in by_model:
        model = catalog.models.get(use.groups[0] or "")
        provider = model.provider if model is not None else None
        sums[provider] = sums.get(provider, Totals()) + use.totals
    names = sorted(sums, key=lambda name: (name is None, name or ""))
    return {"providers": [_line(name, sums[name], invoices.get(name or "")) for name in names]}


def _line(provider: str | None, totals: Totals, invoice: int | None) -> dict[str, Any]:
    line = {"provider": provider, **shown(totals, *COUNTS), **cost_view(totals.cost_nanousd)}
    if invoice is None:
        return line
    more = invoice - totals.cost_nanousd
    percent = (Decimal(100 * more) / invoice).quantize(PERCENT) if invoice else None
    return line | {"invoice_usd": dollars(invoice), "difference_usd": dollars(more), "difference_percent": percent}


def _amount(said: str, provider: str) -> int:
    """Return an amount in nano-dollars. Raises BadRequest."""
    try:
        amount = Decimal(said)
    except InvalidOperation:
        amount = Decimal("NaN")
    if not (amount.is_finite() and abs(amount) <= MOST_USD and amount * NANO == to_nano(amount)):
        wrong = f"needs dollars after '{provider}:', such as 1234.56, at most {MOST_USD} and nine places"
        raise invalid_value("invoice", wrong)
    return to_nano(amount)
