# What the maintained price library (genai-prices, its data bundled, no network) knows of a model: what its tokens
# cost and how long its window is.

from __future__ import annotations

from datetime import UTC, datetime

from gateway.model_facts.listed_models import ListedModel, NoPrice


def listed_model(model: str, *, provider: str, base_url: str, at: datetime | None = None) -> ListedModel | NoPrice:
    """Return what the library says of ``model`` from the moment ``at`` on, or why it names no price.

    The provider is recognised by its base URL, else by its name, else by the model's name alone. Of prices that change
    with the time of day the dearest counts, kind by kind.
    """
    # The library and its data take a quarter of a second: a file that says every price starts without them.
    from genai_prices.data_snapshot import get_snapshot

    from gateway.model_facts.price_listings import read_listing

    snapshot = get_snapshot()
    for name, address in ((None, base_url), (provider, None), (None, None)):
        try:
            _, found = snapshot.find_provider_model(model, None, name, address)
        except LookupError:
            continue
        return read_listing(found, (at or datetime.now(UTC)).astimezone(UTC).date())
    return NoPrice(f"the price library does not know {model}")
