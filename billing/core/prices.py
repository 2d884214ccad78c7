# What a model's tokens cost: dollars per million, whole nano-dollars per million inside. A price may rise with the
# prompt (long context) and change on a day that is known ahead; what is charged is rounded once, up.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from operator import attrgetter
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from billing.core.money import NanoDollars
from billing.core.pictures import PicturePrice, charged, fitting
from protocol.usage import Usage

MILLION = 1_000_000
# What is priced by the piece: the count in a usage, and the field of a price.
UNIT_PRICES = (
    *(("web_searches", "web_search"), ("file_searches", "file_search"), ("containers", "code_interpreter")),
    ("search_units", "search_unit"),
    *(("images", "image"), ("characters", "character"), ("audio_seconds", "audio_second")),
)
PIECES_OF = attrgetter(*(unit for unit, _ in UNIT_PRICES))


class Rates(Struct, frozen=True, kw_only=True):
    """Nano-dollars per million tokens of each kind.

    Parts of the prompt without a price of their own cost what ``input`` costs, reasoning what ``output`` costs.
    """

    input: NanoDollars
    output: NanoDollars
    cached_input: NanoDollars | None = None
    cache_write: NanoDollars | None = None  # kept for five minutes,
    cache_write_1h: NanoDollars | None = None  # or for an hour: ``kept_an_hour`` has it in the place of the other
    reasoning: NanoDollars | None = None
    # Of what is heard, seen by voice and said aloud; ``None``: as words. What was cached without a price of its own
    # costs what is not.
    audio_input: NanoDollars | None = None
    cached_audio: NanoDollars | None = None
    image_input: NanoDollars | None = None
    cached_image: NanoDollars | None = None
    audio_output: NanoDollars | None = None

    @property
    def dearest_input(self) -> int:
        """What a token of the prompt costs at the most that is neither heard nor seen by voice."""
        return max(self.input, self.cached_input or 0, self.cache_write or 0)

    @property
    def dearest_output(self) -> int:
        """What a token of the answer costs at the most that is not said aloud."""
        return max(self.output, self.reasoning or 0)


class PriceStep(Rates, frozen=True, kw_only=True):
    """What every token of a call costs once its prompt has more than ``above`` tokens, cached ones included."""

    above: int


class Price(Rates, frozen=True, kw_only=True):
    """What a model costs: up to its first step as it says itself, beyond each step as the step says.

    Crossing a step changes the price of the whole call, not only of the part beyond, as every provider with such
    prices has it (Anthropic, Google, OpenAI, xAI: "long context").
    """

    request: NanoDollars = NanoDollars(0)  # for each call, whatever its tokens
    web_search: NanoDollars | None = None  # for each search that the upstream makes; None: not known
    file_search: NanoDollars | None = None  # for each of those in files at the upstream; None: not known
    code_interpreter: NanoDollars | None = None  # for each container in which code runs there; None: not known
    image: NanoDollars | None = None  # for each picture that is made, at the most; None: its tokens alone
    pictures: tuple[PicturePrice, ...] = ()  # what each is, where that goes by its quality and size
    character: NanoDollars | None = None  # for each that is said; None: its tokens alone
    audio_second: NanoDollars | None = None  # for each of a recording; None: its tokens alone
    search_unit: NanoDollars | None = None  # for each query with up to a hundred documents to rank; None: nothing
    steps: tuple[PriceStep, ...] = ()  # by rising ``above``
    batch_discount: float = 1.0  # the factor on everything in tier batch; below 1 at our own engines alone
    later: tuple[LaterPrice, ...] = ()  # announced changes, in their order


class LaterPrice(Struct, frozen=True):
    """A price that takes the place of another at a moment known ahead."""

    starts: float  # unix seconds
    price: Price


def cost_of(usage: Usage, price: Price, *, batch: bool = False, at: float | None = None) -> NanoDollars:
    """Return what ``usage`` costs at ``price``, rounded once, up, to a whole nano-dollar.

    ``at`` is when the call was made (unix seconds); unsaid, announced changes are left out of account. Counts that
    cannot be are read as the nearest that can: none below zero, no part larger than its whole.
    """
    discount = price.batch_discount
    if price.later and at is not None:
        price = price_at(price, at)
    prompt, output = usage.input_tokens, usage.output_tokens
    if prompt < 0 or output < 0:
        prompt, output = max(0, prompt), max(0, output)
    requests = 1 + max(0, usage.extra_requests)
    rates = rates_for(-(-prompt // requests), price) if price.steps else price
    per_million = prompt * rates.input + output * rates.output + price.request * requests * MILLION
    if usage.cached_input_tokens or usage.cache_write_tokens:
        cached = min(max(0, usage.cached_input_tokens), prompt)
        per_million += cached * (0 if rates.cached_input is None else rates.cached_input - rates.input)
        written = min(max(0, usage.cache_write_tokens), prompt - cached)
        per_million += written * (0 if rates.cache_write is None else rates.cache_write - rates.input)
    if usage.reasoning_tokens and rates.reasoning is not None:
        per_million += min(max(0, usage.reasoning_tokens), output) * (rates.reasoning - rates.output)
    if usage.audio_input_tokens or usage.image_input_tokens or usage.audio_output_tokens:
        tokens = sum([count * rate for _, count, rate in _tokens_of(usage, rates)])
        per_million = tokens + price.request * requests * MILLION
    for count, rate, _ in _units_of(usage, price):
        per_million += count * rate * MILLION
    return _charge(per_million, discount if batch else 1.0)


class CostLine(Struct, frozen=True):
    """What one kind of thing of a call costs: tokens by their price per million, or requests by their price each."""

    kind: str
    count: int
    rate: int  # nano-dollars
    cost: NanoDollars


def cost_lines(usage: Usage, price: Price, *, batch: bool = False, at: float | None = None) -> list[CostLine]:
    """Return what ``cost_of`` adds up, kind by kind. Each line is rounded up by itself: their sum is less than a
    nano-dollar a line above it."""
    discount = price.batch_discount if batch else 1.0
    price = price if at is None else price_at(price, at)
    requests = 1 + max(0, usage.extra_requests)
    rates = rates_for(-(-max(0, usage.input_tokens) // requests), price)
    kinds = _tokens_of(usage, rates)
    lines = [CostLine(kind, count, rate, _charge(count * rate, discount)) for kind, count, rate in kinds if count]
    if price.request:
        fee = _charge(requests * price.request * MILLION, discount)
        lines.append(CostLine("request", requests, price.request, fee))
    for count, rate, kind in _units_of(usage, price):
        lines.append(CostLine(kind, count, rate, _charge(count * rate * MILLION, discount)))
    return lines


def _tokens_of(usage: Usage, rates: Rates) -> Iterator[tuple[str, int, NanoDollars]]:
    """Yield how many tokens there are of each kind, and what a million of them costs: each token is of one kind."""
    prompt, output = max(0, usage.input_tokens), max(0, usage.output_tokens)
    cached = min(max(0, usage.cached_input_tokens), prompt)
    written = min(max(0, usage.cache_write_tokens), prompt - cached)
    fresh, reasoning, spoken = prompt - cached - written, min(max(0, usage.reasoning_tokens), output), 0
    for kind, count, kept in (
        ("audio", usage.audio_input_tokens, usage.cached_audio_tokens),
        ("image", usage.image_input_tokens, usage.cached_image_tokens),
    ):
        rate, kept_rate = getattr(rates, f"{kind}_input"), getattr(rates, f"cached_{kind}")
        if rate is not None:
            kept = min(max(0, kept), max(0, count), cached)
            count = min(max(0, count) - kept, fresh)
            cached, fresh = cached - kept, fresh - count
            yield f"{kind}_input", count, rate
            yield f"cached_{kind}", kept, rate if kept_rate is None else kept_rate
    if rates.audio_output is not None:
        spoken = min(max(0, usage.audio_output_tokens), output - reasoning)
        yield "audio_output", spoken, rates.audio_output
    yield "input", fresh, rates.input
    yield "cached_input", cached, rates.input if rates.cached_input is None else rates.cached_input
    yield "cache_write", written, rates.input if rates.cache_write is None else rates.cache_write
    yield "output", output - reasoning - spoken, rates.output
    yield "reasoning", reasoning, rates.output if rates.reasoning is None else rates.reasoning


def _units_of(usage: Usage, price: Price) -> Sequence[tuple[int, NanoDollars, str]]:
    """Return what is priced by the piece: how many, at what, and which."""
    if not any(counts := PIECES_OF(usage)):
        return ()  # nearly always
    counted = zip(UNIT_PRICES, counts, strict=True)
    return [(count, rate, kind) for (_, kind), count in counted if count > 0 and (rate := getattr(price, kind))]


def most_cost(most: Usage, price: Price, *, batch: bool = False, at: float | None = None) -> NanoDollars:
    """Return nano-dollars that no usage within ``most`` exceeds: what a hold must cover.

    Within: a prompt of any length up to ``most.input_tokens``, in parts of any kind, and an answer up to
    ``most.output_tokens``, with as many media tokens as ``most`` has. A longer prompt need not be the dearer one, where
    a step lowers a price. ``at`` as in ``cost_of``; unsaid, the dearest of all announced changes counts.
    """
    discount = price.batch_discount if batch else 1.0
    if price.later:
        choices = (price, *(change.price for change in price.later)) if at is None else (price_at(price, at),)
        return max(_charge(_most_per_million(most, choice), discount) for choice in choices)
    return _charge(_most_per_million(most, price), discount)


def kept_an_hour(price: Price) -> Price:
    """Return the price of a call that has its prompt cached for an hour: what is written costs what that does.

    A price that does not say so at each of its steps and changes stays as it is: no such call may be made by it.
    """
    if not says_an_hour(price):
        return price
    steps = tuple(replace(step, cache_write=step.cache_write_1h) for step in price.steps)
    later = tuple(LaterPrice(change.starts, kept_an_hour(change.price)) for change in price.later)
    return replace(price, cache_write=price.cache_write_1h, steps=steps, later=later)


def times(price: Price, factor: float) -> Price:
    """Return a price all of whose rates are ``factor`` times as high, each rounded up."""
    steps = tuple(replace(step, **_rates_times(step, factor)) for step in price.steps)
    later = tuple(LaterPrice(change.starts, times(change.price, factor)) for change in price.later)
    request = _charge(price.request * MILLION, factor)
    said = ((kind, getattr(price, kind)) for _, kind in UNIT_PRICES)
    units = {kind: _charge(rate * MILLION, factor) for kind, rate in said if rate is not None}
    pictures = tuple(replace(row, price=_charge(row.price * MILLION, factor)) for row in price.pictures)
    more: dict[str, Any] = {"request": request, "pictures": pictures, "steps": steps, "later": later}
    return replace(price, **_rates_times(price, factor), **units, **more)


def free(price: Price) -> Price:
    """Return the price of calls that cost the deployment nothing: what it counts, it counts at 0."""
    return times(price, 0.0)


def _rates_times(rates: Rates, factor: float) -> dict[str, NanoDollars]:
    named = ((name, getattr(rates, name)) for name in Rates.__struct_fields__)
    return {name: _charge(rate * MILLION, factor) for name, rate in named if rate is not None}


def for_picture(price: Price, quality: str | None, size: str | None) -> Price:
    """Return the price of a call for pictures of some quality and size: the most that each may be charged, and the rows
    that this leaves. What no row has costs the most of all."""
    rows = fitting(price.pictures, quality, size) or price.pictures
    return replace(price, image=max(row.price for row in rows), pictures=rows) if rows else price


def of_picture(price: Price, quality: str | None, size: str | None) -> Price:
    """Return the price of pictures that were made, of which their provider tells so much."""
    return replace(price, image=charged(price.pictures, quality, size), pictures=()) if price.pictures else price


def picture_prices(price: Price) -> Iterator[Price]:
    """Yield every price that calls for pictures are reckoned by, where it goes by their quality and size."""
    other = ""  # one that has no row of its own
    qualities = dict.fromkeys((None, other, *(row.quality for row in price.pictures)))
    sizes = dict.fromkeys((None, other, *(row.size for row in price.pictures)))
    if price.pictures:
        yield from (for_picture(price, quality, size) for quality in qualities for size in sizes)
        yield from (replace(price, image=row.price, pictures=()) for row in price.pictures)


def says_an_hour(price: Price) -> bool:
    """Whether a price says what a cache of an hour costs to write."""
    said = all(rates.cache_write_1h is not None for rates in (price, *price.steps))
    return said and all(says_an_hour(change.price) for change in price.later)


def rates_for(prompt: int, price: Price) -> Rates:
    """Return the rates of a call whose prompt has ``prompt`` tokens."""
    found: Rates = price
    for step in price.steps:
        if prompt <= step.above:
            break
        found = step
    return found


def price_at(price: Price, moment: float) -> Price:
    """Return the price of ``moment`` (unix seconds), announced changes counted in."""
    found = price
    for change in price.later:
        if moment < change.starts:
            break
        found = change.price
    return found


def _most_per_million(most: Usage, price: Price) -> int:
    requests = 1 + most.extra_requests  # each of them with the same prompt
    prompt, made = -(-most.input_tokens // requests), most.output_tokens
    reached = tuple(_reachable(prompt, price)) if price.steps else ((price, prompt),)
    dearest = max([prompt * requests * rates.dearest_input + made * rates.dearest_output for rates, prompt in reached])
    if most.audio_input_tokens or most.image_input_tokens or most.audio_output_tokens:
        dearest = max(_most_of_media(most, rates, prompt * requests) for rates, prompt in reached)
    pieces = sum([count * rate for count, rate, _ in _units_of(most, price)])
    return dearest + (price.request * requests + pieces) * MILLION


def _most_of_media(most: Usage, rates: Rates, prompt: int) -> int:
    """Return what a prompt and an answer cost at the most that are heard, seen and said as far as ``most`` has it."""
    words, said = rates.dearest_input, rates.dearest_output
    cost, left = prompt * words + most.output_tokens * said, prompt
    heard = max(rates.audio_input or 0, rates.cached_audio or 0), most.audio_input_tokens
    seen = max(rates.image_input or 0, rates.cached_image or 0), most.image_input_tokens
    for rate, count in sorted((heard, seen), reverse=True):
        if rate > words:
            cost += min(count, left) * (rate - words)
            left -= min(count, left)
    return cost + min(most.audio_output_tokens, most.output_tokens) * max(0, (rates.audio_output or 0) - said)


def _reachable(prompt: int, price: Price) -> Iterator[tuple[Rates, int]]:
    """Yield the rates of each step that a prompt of up to ``prompt`` tokens can reach, and its longest prompt there."""
    rates: Rates = price
    for step in price.steps:
        if prompt <= step.above:
            break
        yield rates, step.above
        rates = step
    yield rates, prompt


def _charge(per_million: int, factor: float) -> NanoDollars:
    if factor == 1.0:
        return NanoDollars(-(-per_million // MILLION))
    exact = _fraction(factor)
    return NanoDollars(-(-per_million * exact.numerator // (MILLION * exact.denominator)))


@lru_cache
def _fraction(factor: float) -> Fraction:
    """Return a factor as the decimal that it prints as: 0.1 is a tenth."""
    return Fraction(Decimal(str(factor)))
