# In which order targets are tried that can all serve a request: what is down goes last, the rest by what it costs
# and how soon it answers.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TypeVar

from msgspec.structs import replace

from billing.core.prices import Price
from protocol.inference import Generation, Request
from protocol.usage import Usage
from router.catalog.catalog import Catalog
from router.catalog.targets import HEALTHY, ModelSpec, Target, TargetHealth
from router.prompt_size.bounds import pieces_likely, replies_asked
from router.prompt_size.prompt_lengths import prompt_characters

CHARACTERS_PER_TOKEN = 4  # of English text; only the order of targets rests on it
TYPICAL_REPLY_TOKENS = 256  # of a reply, where costs are compared; public chat traces have 211 on average
SAME_COST = 1.05  # costs within this factor are a tie
SAME_TIME = 1.25  # so are predicted times to the first token,
SAME_TIME_MS = 25.0  # and those that differ by less than a network does from call to call
TURN = 65_521  # makes a second draw of one

Health = Mapping[str, TargetHealth]
T = TypeVar("T")
_VALUE = itemgetter(0)


def expected_usage(request: Request) -> Usage:
    """Return what the request will use, as far as one can tell before it runs: good enough to compare prices."""
    prompt = -(-prompt_characters(request) // CHARACTERS_PER_TOKEN)
    if not isinstance(request, Generation):
        return replace(pieces_likely(request), input_tokens=prompt)
    limit = TYPICAL_REPLY_TOKENS if request.output_limit is None else request.output_limit
    replies = min(limit, TYPICAL_REPLY_TOKENS) * replies_asked(request)
    return Usage(input_tokens=prompt, output_tokens=replies)


def by_cost(
    models: Sequence[ModelSpec],
    cost: Callable[[Price], int],
    catalog: Catalog,
    health: Health,
    share: float,
    spread: float = 0.0,
) -> list[Target]:
    """Return every endpoint of ``models``, the cheapest first: ``cost`` is what a call comes to at a price.

    Among near-ties the soonest first token comes first. Models equal in both take turns by weight: ``share`` in [0, 1)
    points at one of them, and the rest follow. Endpoints of one model keep their order of preference, by ``spread``.
    """
    if len(models) < 2:
        return by_preference(models[0], catalog, health, spread) if models else []
    ordered: list[Target] = []
    for equal in _ties([(cost(model.price), model) for model in models], SAME_COST):
        if len(equal) == 1:
            ordered += by_preference(equal[0], catalog, health, spread)
            continue
        targets = [target for model in equal for target in by_preference(model, catalog, health, spread)]
        for tied in _soonest_first(targets, health):
            ordered += _in_turn(tied, share)
    return ordered


def by_preference(model: ModelSpec, catalog: Catalog, health: Health, spread: float = 0.0) -> list[Target]:
    """Return the model's endpoints: providers by their portions, regions as configured, replicas of a region by time.

    Providers, and replicas that answer about as soon as each other, take turns: ``spread`` in [0, 1) points at one.
    """
    return _by_portion(model, catalog, health, spread) if model.others else _at_provider(model, catalog, health, spread)


def _at_provider(model: ModelSpec, catalog: Catalog, health: Health, spread: float) -> list[Target]:
    if not health and not catalog.has_replicas(model):
        return list(catalog.targets_at(model))
    ordered: list[Target] = []
    for replicas in catalog.regions_of(model):
        if len(replicas) == 1:
            ordered += replicas
            continue
        for tied in _soonest_first(replicas, health):
            first = int(spread * len(tied))
            ordered += tied[first:] + tied[:first]
    return ordered


def _by_portion(model: ModelSpec, catalog: Catalog, health: Health, spread: float) -> list[Target]:
    """Return the endpoints of a model at several providers: ``spread`` points at one of these, and the rest follow.

    Each has its portion of the calls, 1 where it says none; a portion of 0 comes last. Where none says any, those whose
    first token comes about soonest share equally, and the slower ones follow.
    """
    everywhere = [one for one in model.everywhere if catalog.endpoints[one.provider]]  # a pool may be empty
    inside = spread * TURN % 1.0  # else all that goes to one provider would meet the same of its replicas
    pools = [_at_provider(one, catalog, health, inside) for one in everywhere]
    if any(one.portion is not None for one in everywhere):
        portions = [1.0 if one.portion is None else one.portion for one in everywhere]
        weighed = [*zip(portions, pools, strict=True)]
        spares = [pool for portion, pool in weighed if not portion]
        pools = [*_turned([each for each in weighed if each[0]], spread), *spares]
    else:
        by_head = {pool[0].key: pool for pool in pools}
        tied = _soonest_first([pool[0] for pool in pools], health)
        pools = [pool for heads in tied for pool in _turned([(1.0, by_head[head.key]) for head in heads], spread)]
    return [target for pool in pools for target in pool]


def _turned(weighed: Sequence[tuple[float, T]], point: float) -> list[T]:
    """Return things in their order, beginning with the one that ``point`` in [0, 1) of their weights lies in."""
    point *= sum(weight for weight, _ in weighed)
    first = 0
    while first < len(weighed) - 1 and point >= weighed[first][0]:
        point -= weighed[first][0]
        first += 1
    things = [thing for _, thing in weighed]
    return things[first:] + things[:first]


def unavailable_last(targets: Iterable[Target], health: Health) -> tuple[Target, ...]:
    """Return the targets in the order given, those with an open breaker or a full queue behind all others."""
    if not health:
        return tuple(targets)
    available: list[Target] = []
    unavailable: list[Target] = []
    for target in targets:
        known = health.get(target.key, HEALTHY)
        (unavailable if known.is_open or known.is_full else available).append(target)
    return (*available, *unavailable)


def _soonest_first(targets: Sequence[Target], health: Health) -> list[list[Target]]:
    """Return groups of targets that answer about as soon as each other, by the first token that is predicted.

    A target without a prediction is among the soonest, until there is one.
    """
    if not health or len(targets) < 2:
        return [list(targets)]
    known = [health.get(target.key, HEALTHY).first_token_ms for target in targets]
    least = min(filter(None, known), default=0.0)
    return _ties(
        [(time or least, target) for time, target in zip(known, targets, strict=True)], SAME_TIME, SAME_TIME_MS
    )


def _ties(valued: list[tuple[float, T]], factor: float, margin: float = 0.0) -> list[list[T]]:
    """Return groups of things by rising value; none exceeds the least of its group by more than factor or margin."""
    groups: list[list[T]] = []
    ceiling = -1.0
    for value, thing in sorted(valued, key=_VALUE):
        if value > ceiling:
            group = [thing]
            groups.append(group)
            ceiling = max(value * factor, value + margin)
        else:
            group.append(thing)
    return groups


def _in_turn(targets: list[Target], share: float) -> list[Target]:
    """Return the targets, those of the model that ``share`` points at first; a model's share is its weight's."""
    if len(targets) < 2:
        return targets
    by_model: dict[str, list[Target]] = {}
    for target in targets:
        by_model.setdefault(target.model.name, []).append(target)
    groups = list(by_model.values())
    if len(groups) == 1:
        return groups[0]
    turned = _turned([(max(0.0, group[0].model.weight), group) for group in groups], share)
    return [target for group in turned for target in group]
