# In which order targets are tried that can all serve a request: what is down goes last, the rest by what it costs
# and how soon it answers.

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Literal

from billing.money import NanoDollars
from billing.prices import cost_of
from protocol.embeddings import EmbeddingRequest
from protocol.usage import Usage
from router import bounds
from router.abilities import InferenceRequest
from router.catalog import Catalog
from router.targets import HEALTHY, ModelSpec, Target, TargetHealth

CHARACTERS_PER_TOKEN = 4  # of English text; only the order of targets rests on it
TYPICAL_REPLY_TOKENS = 256  # of a reply, where costs are compared; public chat traces have 211 on average
SAME_COST = 1.05  # costs within this factor are a tie
SAME_TIME = 1.25  # so are predicted times to the first token,
SAME_TIME_MS = 25.0  # and those that differ by less than a network does from call to call

Health = Mapping[str, TargetHealth]
Row = tuple[NanoDollars, float, Target]  # nano-dollars expected, milliseconds to the first token expected, the target


def expected_usage(request: InferenceRequest) -> Usage:
    """Return what the request will use, as far as one can tell before it runs: good enough to compare prices."""
    prompt = -(-bounds.prompt_characters(request) // CHARACTERS_PER_TOKEN)
    if isinstance(request, EmbeddingRequest):
        return Usage(input_tokens=prompt)
    limit = TYPICAL_REPLY_TOKENS if request.output_limit is None else request.output_limit
    replies = min(limit, TYPICAL_REPLY_TOKENS) * bounds.replies_asked(request)
    return Usage(input_tokens=prompt, output_tokens=replies)


def by_cost(
    models: Sequence[ModelSpec], usage: Usage, catalog: Catalog, health: Health, share: float, *, batch: bool
) -> list[Target]:
    """Return every endpoint of ``models``, the cheapest first.

    Among near-ties the soonest first token comes first. Models equal in both take turns by weight: ``share`` in [0, 1)
    points at one of them, and the rest follow. Endpoints of one model keep their order of preference.
    """
    rows = [
        (cost, _first_token_ms(target, health), target)
        for cost, model in ((cost_of(usage, model.price, batch=batch), model) for model in models)
        for target in by_preference(model, catalog, health)
    ]
    return [
        target
        for equal_cost in _ties(rows, 0, SAME_COST)
        for equal in _ties(equal_cost, 1, SAME_TIME, SAME_TIME_MS)
        for target in _in_turn([target for _, _, target in equal], share)
    ]


def by_preference(model: ModelSpec, catalog: Catalog, health: Health) -> list[Target]:
    """Return the model's endpoints: regions in the order configured, replicas of a region by time and queue."""
    targets = catalog.targets_of(model)
    if len(targets) == 1 or not health:
        return list(targets)
    regions = list(dict.fromkeys(target.endpoint.region for target in targets))
    ordered: list[Target] = []
    for region in regions:
        replicas = [(NanoDollars(0), _first_token_ms(t, health), t) for t in targets if t.endpoint.region == region]
        for equal in _ties(replicas, 1, SAME_TIME, SAME_TIME_MS):
            tied = [target for _, _, target in equal]
            ordered += sorted(tied, key=lambda target: health.get(target.key, HEALTHY).queue_depth)
    return ordered


def unavailable_last(targets: Iterable[Target], health: Health) -> tuple[Target, ...]:
    """Return the targets in the order given, those with an open breaker or a full queue behind all others."""
    if not health:
        return tuple(targets)
    return tuple(sorted(targets, key=lambda target: _is_unavailable(health.get(target.key, HEALTHY))))


def _is_unavailable(health: TargetHealth) -> bool:
    return health.is_open or health.is_full


def _first_token_ms(target: Target, health: Health) -> float:
    return health.get(target.key, HEALTHY).first_token_ms if health else 0.0


def _ties(rows: list[Row], column: Literal[0, 1], factor: float, margin: float = 0.0) -> list[list[Row]]:
    """Return groups of rows by rising value; none exceeds the least of its group by more than factor or margin."""
    if len(rows) < 2:
        return [rows] if rows else []
    groups: list[list[Row]] = []
    ceiling = -1.0
    for row in sorted(rows, key=itemgetter(column)):
        if row[column] > ceiling:
            groups.append([])
            ceiling = max(row[column] * factor, row[column] + margin)
        groups[-1].append(row)
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
    weights = [max(0.0, group[0].model.weight) for group in groups]
    point = share * sum(weights)
    first = 0
    while first < len(groups) - 1 and point >= weights[first]:
        point -= weights[first]
        first += 1
    return [target for group in (*groups[first:], *groups[:first]) for target in group]
