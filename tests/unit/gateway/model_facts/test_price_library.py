# Prices from the library: ours must charge what the library itself would, for every model that it can price.

from __future__ import annotations

import warnings
from datetime import UTC, datetime, time

import pytest
from genai_prices.data_snapshot import get_snapshot
from genai_prices.types import ModelInfo, TimeOfDateConstraint
from genai_prices.types import Usage as TheirUsage

from billing.core.money import to_nano
from billing.core.prices import Price, PriceStep, cost_of
from gateway.model_facts.listed_models import ListedModel, NoPrice
from gateway.model_facts.price_library import listed_model, read_listing
from protocol.usage import Usage

OPENAI = {"provider": "openai", "base_url": "https://api.openai.com/v1"}
ANTHROPIC = {"provider": "anthropic", "base_url": "https://api.anthropic.com"}
GOOGLE = {"provider": "google", "base_url": "https://generativelanguage.googleapis.com/v1beta/openai"}
AUTUMN = datetime(2026, 10, 1, tzinfo=UTC)
USAGES = [
    Usage(0, 0, 1),
    Usage(1_000, 400, 200, 50, 100),
    Usage(128_000, 0, 10),
    Usage(128_001, 64_000, 10),
    Usage(200_000, 1_000, 4_000, 3_000),
    Usage(200_001, 1_000, 4_000, 3_000),
    Usage(272_001, 0, 4_000, 0, 272_000),
    Usage(900_000, 300_000, 64_000, 1, 300_000),
]


def priced(model: str, at: datetime = AUTUMN, **where: str) -> Price:
    """Return the price of a model that the library knows."""
    listed = listed_model(model, **where, at=at)
    assert isinstance(listed, ListedModel), listed
    return listed.price


@pytest.mark.parametrize(
    ("model", "where", "usage", "dollars"),
    [
        # https://openai.com/api/pricing: $2.50 in, $1.25 cached, $10 out
        # 1,000 × 2.5 + 500 × 1.25 + 250 × 10 = 5,625 millionths
        ("gpt-4o", OPENAI, Usage(1_500, 500, 250), "0.005625"),
        # the same page: $0.15, $0.075, $0.60; 7 × 0.15 + 3 × 0.6 = 2.85 millionths
        ("gpt-4o-mini", OPENAI, Usage(7, 0, 3), "0.00000285"),
        # https://docs.claude.com/en/docs/about-claude/pricing, Haiku 4.5: $1, write $1.25, read $0.10, $5
        # 100 × 1 + 1,000 × 1.25 + 2,000 × 0.1 + 300 × 5 = 3,050 millionths
        ("claude-haiku-4-5", ANTHROPIC, Usage(3_100, 2_000, 300, 0, 1_000), "0.00305"),
        # Sonnet 4.5 up to 200K tokens: $3, write $3.75, read $0.30, $15; thinking is output
        # 50,000 × 3 + 50,000 × 3.75 + 100,000 × 0.3 + 2,000 × 15 = 397,500 millionths
        ("claude-sonnet-4-5", ANTHROPIC, Usage(200_000, 100_000, 2_000, 1_500, 50_000), "0.3975"),
        # beyond: $6, $7.50, $0.60, $22.50 for all of it
        # 50,001 × 6 + 50,000 × 7.5 + 100,000 × 0.6 + 2,000 × 22.5 = 780,006 millionths
        ("claude-sonnet-4-5", ANTHROPIC, Usage(200_001, 100_000, 2_000, 1_500, 50_000), "0.780006"),
        # Opus 4.5: $5, read $0.50, $25; 1,000 × 5 + 9,000 × 0.5 + 400 × 25 = 19,500 millionths
        ("claude-opus-4-5", ANTHROPIC, Usage(10_000, 9_000, 400), "0.0195"),
        # Opus 4.1: $15, $75; 33 × 15 + 7 × 75 = 1,020 millionths
        ("claude-opus-4-1", ANTHROPIC, Usage(33, 0, 7), "0.00102"),
        # https://ai.google.dev/gemini-api/docs/pricing, 2.5 Pro up to 200K: $1.25, $10
        # 200,000 × 1.25 + 1 × 10 = 250,010 millionths
        ("gemini-2.5-pro", GOOGLE, Usage(200_000, 0, 1), "0.25001"),
        # beyond: $2.50, cached $0.25, $15; 200,000 × 2.5 + 100,000 × 0.25 + 8,000 × 15 = 645,000 millionths
        ("gemini-2.5-pro", GOOGLE, Usage(300_000, 100_000, 8_000), "0.645"),
    ],
)
def test_well_known_models_cost_what_their_providers_say(
    model: str, where: dict[str, str], usage: Usage, dollars: str
) -> None:
    """To the nano-dollar, computed by hand from the providers' own pages."""
    assert cost_of(usage, priced(model, **where)) == to_nano(dollars)


def test_every_price_charges_what_the_library_itself_would() -> None:
    """All models, on both sides of every step: equal but for rounding, and for what changes with the time of day."""
    snapshot, compared = get_snapshot(), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for provider in snapshot.providers:
            for model in provider.models:
                listed = read_listing(model, AUTUMN.date())
                if not isinstance(listed, ListedModel) or _changes_by_the_hour(model):
                    continue
                compared += 1
                for usage in USAGES:
                    theirs = model.calc_price(_theirs(usage), provider, genai_request_timestamp=AUTUMN)
                    ours = cost_of(usage, listed.price, at=AUTUMN.timestamp())
                    # A rate such as 0.0833333333333333 is kept to a billionth of a dollar: a nano-dollar a million.
                    assert abs(ours - theirs.total_price * 10**9) <= 3, (provider.id, model.id, usage)

    assert compared > 1_500


def test_a_price_that_changes_by_the_hour_counts_at_its_dearest() -> None:
    """Nobody is undercharged at peak hours, whatever time it was when the house started."""
    night, day = (datetime.combine(AUTUMN, time(hour, tzinfo=UTC)) for hour in (20, 12))
    where = {"provider": "deepseek", "base_url": "https://api.deepseek.com"}
    names = [model.id for model in _models("deepseek") if _changes_by_the_hour(model)]

    assert "deepseek-chat" in names
    for name in names:
        dear = {moment: priced(name, at=moment, **where) for moment in (night, day)}
        assert dear[night] == dear[day]
        [found] = [model for model in _models("deepseek") if model.id == name]
        for hour in range(24):
            listed = found.get_prices(datetime.combine(AUTUMN, time(hour, 45, tzinfo=UTC)))
            assert dear[day].input >= to_nano(listed.input_mtok) and dear[day].output >= to_nano(listed.output_mtok)


def test_an_announced_change_is_known_ahead() -> None:
    """A house that runs over the day of a change charges the new price from that day on."""
    [model] = [model for model in _models("openai") if model.id == "gpt-5.6-sol"]
    before, change = datetime(2026, 8, 1, tzinfo=UTC), datetime(2026, 8, 21, tzinfo=UTC)
    price = priced("gpt-5.6-sol", at=before, **OPENAI)
    million = Usage(100_000, output_tokens=10_000)

    for moment in (before, change.replace(day=20, hour=23, minute=59), change):
        theirs = model.calc_price(_theirs(million), get_snapshot().providers[0], genai_request_timestamp=moment)
        assert cost_of(million, price, at=moment.timestamp()) == theirs.total_price * 10**9
    assert [later.starts for later in price.later] == [change.timestamp()]
    assert priced("gpt-5.6-sol", at=change, **OPENAI).later == ()


def test_long_context_prices_have_their_steps() -> None:
    """The steps of the library are ours, for every kind of token."""
    assert priced("claude-sonnet-4-5", **ANTHROPIC).steps == (
        PriceStep(
            above=200_000,
            input=to_nano(6),
            output=to_nano("22.5"),
            cached_input=to_nano("0.6"),
            cache_write=to_nano("7.5"),
            cache_write_1h=to_nano(12),
        ),
    )


def test_a_fee_for_each_call_is_charged() -> None:
    """Perplexity asks twelve dollars for a thousand calls beside the tokens."""
    price = priced("sonar", provider="perplexity", base_url="https://api.perplexity.ai")

    assert price.request == to_nano("0.012")
    assert cost_of(Usage(1_000, output_tokens=500), price) == to_nano("0.0135")


@pytest.mark.parametrize(
    ("model", "provider", "why"),
    [
        ("no-such-model", "openai", "does not know no-such-model"),
        ("gemma-3", "google", "as free"),
        ("gpt-4o", "github-copilot", "as free"),  # though others ask money for it
        ("gpt-4o-search-preview", "openai", "searches the web"),
        ("sonar-deep-research", "perplexity", "output_citation_mtok"),
        ("gemini-2.5-flash-image", "google", "output_image_mtok"),
    ],
)
def test_a_price_known_in_part_is_none(model: str, provider: str, why: str) -> None:
    """What the library lists as free, or with charges that no usage tells, the file must price."""
    listed = listed_model(model, provider=provider, base_url="https://gateway.example/v1", at=AUTUMN)

    assert isinstance(listed, NoPrice)
    assert why in listed.why


def test_no_rate_of_any_model_is_zero() -> None:
    """But for the output of models that have none, which says so."""
    for provider in get_snapshot().providers:
        for model in provider.models:
            listed = read_listing(model, AUTUMN.date())
            if isinstance(listed, ListedModel):
                for rates in (listed.price, *listed.price.steps):
                    assert rates.input > 0 and (rates.output > 0 or not listed.has_output), model.id


def _models(provider: str) -> list[ModelInfo]:
    return next(known.models for known in get_snapshot().providers if known.id == provider)


def _changes_by_the_hour(model: ModelInfo) -> bool:
    several = model.prices if isinstance(model.prices, list) else []
    return any(isinstance(one.constraint, TimeOfDateConstraint) for one in several)


def _theirs(usage: Usage) -> TheirUsage:
    return TheirUsage(
        input_tokens=usage.input_tokens,
        cache_read_tokens=usage.cached_input_tokens,
        cache_write_tokens=usage.cache_write_tokens,
        output_tokens=usage.output_tokens,
        output_reasoning_tokens=usage.reasoning_tokens,
    )
