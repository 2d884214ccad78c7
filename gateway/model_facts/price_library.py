# What the maintained price library (genai-prices, its data bundled, no network) knows of a model: what its tokens
# cost and how long its window is. A price that it knows only in part is no price: it says so instead. The library and
# its data take a quarter of a second: import this where it is asked, so that a file that says all prices does without.

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any, TypeVar

from genai_prices.data_snapshot import get_snapshot
from genai_prices.types import ModelInfo, ModelPrice, StartDateConstraint, TieredPrices, TimeOfDateConstraint
from msgspec.structs import replace

from billing.core.money import NanoDollars, to_nano
from billing.core.prices import LaterPrice, Price, PriceStep, Rates
from gateway.model_facts.listed_models import ListedModel, NoPrice, embeds

# Our name of a rate, the library's, and the one that stands in where a listing has no rate of that kind.
KINDS = (
    ("input", "input_mtok", None),
    ("output", "output_mtok", None),
    ("cached_input", "cache_read_mtok", "input_mtok"),
    ("cache_write", "cache_write_mtok", "input_mtok"),
    ("reasoning", "output_reasoning_mtok", "output_mtok"),
    ("audio_input", "input_audio_mtok", "input_mtok"),
    ("cached_audio", "cache_audio_read_mtok", "input_audio_mtok"),
    ("audio_output", "output_audio_mtok", "output_mtok"),
    ("image_input", "input_image_mtok", "input_mtok"),
    ("cached_image", "cache_image_read_mtok", "input_image_mtok"),
)
REQUESTS = "requests_kcount"  # dollars per thousand calls
SEARCHES = "web_searches_kcount"  # and per thousand searches that a model asked for
# What a model may charge for without being asked to, and our usage does not tell apart.
UNCOUNTED = (
    "output_citation_mtok",
    "output_image_mtok",
    "output_video_mtok",
    "input_image_mtok",
    "input_mchars",
    "input_text_messages_kcount",
)
# Models that make pictures and nothing else.
PICTURES = re.compile(r"gpt-image-")
# Models that search the web at every call: a fee beside their tokens, which the library has for few of them.
SEARCHING = re.compile(r"(^|[-/])(search|sonar|online|deep-research)($|[-/:])")


def listed_model(model: str, *, provider: str, base_url: str, at: datetime | None = None) -> ListedModel | NoPrice:
    """Return what the library says of ``model`` from the moment ``at`` on, or why it names no price.

    The provider is recognised by its base URL, else by its name, else by the model's name alone. Of prices that change
    with the time of day the dearest counts, kind by kind.
    """
    snapshot = get_snapshot()
    for name, address in ((None, base_url), (provider, None), (None, None)):
        try:
            _, found = snapshot.find_provider_model(model, None, name, address)
        except LookupError:
            continue
        return read_listing(found, (at or datetime.now(UTC)).astimezone(UTC).date())
    return NoPrice(f"the price library does not know {model}")


def knows_provider(base_url: str) -> bool:
    """Whether the library has prices of the provider at ``base_url``."""
    try:
        return bool(get_snapshot().find_provider(None, None, base_url))
    except LookupError:
        return False


def listed_names(*, base_url: str, prefix: str = "", at: datetime | None = None) -> tuple[list[str], list[str]]:
    """Return the models that the library lists for the provider at ``base_url``: those with a price that is known, and
    those without. ``prefix``: what the provider's own names begin with, and the library's do not.

    Some listings stand under a name that the provider has not: they are none of either.
    """
    priced, unpriced = list[str](), list[str]()
    if not knows_provider(base_url):
        return priced, unpriced
    provider = get_snapshot().find_provider(None, None, base_url)
    today = (at or datetime.now(UTC)).astimezone(UTC).date()
    for model in provider.models:
        if provider.find_model(prefix + model.id) is not model:
            continue
        listing = read_listing(model, today)
        is_known = isinstance(listing, ListedModel) and (listing.has_output or embeds(model.id))
        (priced if is_known else unpriced).append(model.id)
    return priced, unpriced


def read_listing(model: ModelInfo, today: date) -> ListedModel | NoPrice:
    """Return what the listing of a model says from ``today`` on."""
    later = [day for day in _changes(model) if day > today]
    listings = {day: _listings(model, day) for day in (today, *later)}
    all_listings = [listing for several in listings.values() for listing in several]
    if not all(_says(listing, "input_mtok") for listing in all_listings):
        return NoPrice(f"the price library lists {model.id} as free, or without a price for prompts")
    counted = {"input_image_mtok"} if PICTURES.match(model.id) else set[str]()  # its usage tells those
    kinds = [kind for kind in UNCOUNTED if kind not in counted]
    if uncounted := [kind for kind in kinds if any(_says(listing, kind) for listing in all_listings)]:
        return NoPrice(f"the price library has a price for {model.id} that no usage tells: {', '.join(uncounted)}")
    if SEARCHING.search(model.id.lower()) and not all(_says(listing, REQUESTS) for listing in all_listings):
        return NoPrice(f"{model.id} searches the web, at a price per call that the price library does not know")
    starts = {day: datetime.combine(day, time(tzinfo=UTC)).timestamp() for day in later}
    changes = tuple(LaterPrice(starts[day], _price(listings[day])) for day in later)
    price = _price(listings[today], later=changes)
    price = _with_hours(price) if "claude" in model.id.lower() else price
    has_output = all(_says(listing, "output_mtok") for listing in all_listings)
    return ListedModel(price=price, context=model.context_window, has_output=has_output)


def _changes(model: ModelInfo) -> list[date]:
    """Return the days on which the model's price changes."""
    if isinstance(model.prices, ModelPrice):
        return []
    constraints = [one.constraint for one in model.prices]
    return sorted({one.start_date for one in constraints if isinstance(one, StartDateConstraint)})


def _listings(model: ModelInfo, day: date) -> list[ModelPrice]:
    """Return every price that holds at some time of ``day``."""
    if isinstance(model.prices, ModelPrice):
        return [model.prices]
    moments = {time(tzinfo=UTC)}
    for one in model.prices:
        if isinstance(one.constraint, TimeOfDateConstraint):
            moments |= {one.constraint.start_time, one.constraint.end_time}
    return [model.get_prices(datetime.combine(day, moment, moment.tzinfo or UTC)) for moment in moments]


def _price(listings: Sequence[ModelPrice], later: tuple[LaterPrice, ...] = ()) -> Price:
    values = [value for listing in listings for value in vars(listing).values()]
    starts = sorted({tier.start for value in values if isinstance(value, TieredPrices) for tier in value.tiers})
    requests = max(_rate(listing, REQUESTS, 0) for listing in listings)
    searches = max(_rate(listing, SEARCHES, 0) for listing in listings)
    rates: dict[str, Any] = _rates(listings, 0)
    return Price(
        **rates,
        request=to_nano(requests / 1000),
        web_search=to_nano(searches / 1000) if searches else None,
        steps=tuple(PriceStep(above=start, **_rates(listings, start + 1)) for start in starts),
        later=later,
    )


SomeRates = TypeVar("SomeRates", bound=Rates)


def _with_hours(price: Price) -> Price:
    """Return a price with what a cache of an hour costs to write, wherever five minutes cost as Anthropic has it."""
    steps = tuple(map(_with_hour, price.steps))
    later = tuple(LaterPrice(change.starts, _with_hours(change.price)) for change in price.later)
    return replace(_with_hour(price), steps=steps, later=later)


def _with_hour(rates: SomeRates) -> SomeRates:
    """Return rates with that of an hour: twice the input's where five minutes cost a quarter more (Anthropic, "Prompt
    caching"). The library has no such rate."""
    is_usual = rates.cache_write is not None and 4 * rates.cache_write == 5 * rates.input
    return replace(rates, cache_write_1h=NanoDollars(2 * rates.input)) if is_usual else rates


def _rates(listings: Sequence[ModelPrice], prompt: int) -> dict[str, NanoDollars]:
    """Return the dearest rate of each kind that is listed, for a prompt of so many tokens."""
    rates = {"output": NanoDollars(0)}  # where nothing is listed: has_output says so
    for ours, theirs, stand_in in KINDS:
        if any(_says(listing, theirs) for listing in listings):
            said = [theirs if _says(listing, theirs) else stand_in or theirs for listing in listings]
            rates[ours] = to_nano(max(_rate(*pair, prompt) for pair in zip(listings, said, strict=True)))
    return rates


def _rate(listing: ModelPrice, kind: str, prompt: int) -> Decimal:
    """Return a rate in dollars: of several, that of the last step whose start the prompt has passed."""
    value: Decimal | TieredPrices | None = getattr(listing, kind, None)
    if isinstance(value, TieredPrices):
        passed = [tier.price for tier in value.tiers if prompt > tier.start]
        return passed[-1] if passed else value.base
    return value or Decimal(0)


def _says(listing: ModelPrice, kind: str) -> bool:
    """Whether the listing has a price above zero for a kind: a zero is a gap in the data until the file says it."""
    value: Decimal | TieredPrices | None = getattr(listing, kind, None)
    return bool(value.base if isinstance(value, TieredPrices) else value)
