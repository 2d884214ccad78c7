# Samples shadow traffic: watches a few replies of small models, and of large ones where a route explores, and notes
# what was asked and answered when they end.
# A call that is not sampled costs one look at the route.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import random

import msgspec
import structlog
from msgspec.structs import replace

from billing.core.money import to_text
from billing.core.records import Status, UsageRecord
from billing.core.store_errors import told_if_away
from gateway.calls.call import Call
from gateway.calls.hooks import NO_HOOK, ReplyHook
from gateway.core.background import Background
from gateway.core.clock import Clock
from gateway.inference.recalibrations import learns
from gateway.shadow.judging import longest_judge_request
from gateway.shadow.store import ShadowCall, note_call
from gateway.storage.database import Database
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.team_keys import brings_keys
from protocol.chat import ChatReply, ChatRequest, ItemMessage
from protocol.events import Delta
from protocol.inference import WholeReply
from router.catalog.catalog import AutoRoute, Catalog
from router.catalog.routing_options import RoutingOptions
from router.catalog.targets import Target, Tier
from router.eligibility import can_serve, needs_of
from router.learning import packed_form
from router.prompt_size.bounds import cost_most, is_spoken

LARGEST_BODY = 256 * 1024  # bytes of a request that is noted
LONGEST_ANSWER = 64 * 1024  # characters

log = structlog.get_logger(__name__)


class Sampler:
    """Decides which replies are watched."""

    def __init__(
        self,
        catalog: Catalog,
        providers: ProviderRegistry,
        database: Database,
        background: Background,
        clock: Clock,
        scored_by: str,
        dice: Callable[[], float] = random,
    ) -> None:
        self._database = database
        self._background = background
        self._clock = clock
        self._scored_by = scored_by
        self._dice = dice
        self.follow(catalog, providers)

    def follow(self, catalog: Catalog, providers: ProviderRegistry) -> None:
        """Sample by another catalogue from now on, at other providers."""
        self._catalog, self._providers = catalog, providers
        self._routes: Mapping[str, AutoRoute] = {
            name: route for name, route in catalog.auto.items() if route.shadow is not None
        }

    def watch(self, call: Call, target: Target) -> ReplyHook:
        """Watch a reply that may be sampled."""
        if not self._routes or brings_keys(call.caller.team, self._providers):
            return NO_HOOK  # what a team's own account is asked is its own doing alone
        name = self._catalog.meaning(call.request.model)
        route = self._routes.get(name)
        if route is None or not is_comparable(call):
            return NO_HOOK
        assert route.shadow is not None
        if target.model.name not in route.small and not (route.shadow.explore and target.model.name in route.large):
            return NO_HOOK
        return Watch(self, call, name, self._catalog) if self._dice() < route.shadow.share else NO_HOOK

    def note(self, call: Call, name: str, catalog: Catalog, record: UsageRecord, answer: str) -> None:
        """Note a call, behind its back, by the catalogue that it was routed by."""
        self._background.spawn(self._note(call, name, catalog, record, answer))

    async def _note(self, call: Call, name: str, catalog: Catalog, record: UsageRecord, answer: str) -> None:
        shadow = catalog.auto[name].shadow
        noted = shadow_call(call, name, catalog, record, answer, self._scored_by)
        if noted is None or shadow is None:
            return
        with told_if_away(log, "shadow_call_not_noted", request_id=call.request_id):  # one sample less
            async with self._database.begin() as connection:
                is_within = await note_call(connection, self._clock, noted, shadow.budget_nanousd)
            log.info("shadow_call", request_id=call.request_id, route=name, is_within_budget=is_within)


class Watch(ReplyHook):
    """Gathers the text of one reply."""

    def __init__(self, sampler: Sampler, call: Call, name: str, catalog: Catalog) -> None:
        self._sampler, self._call, self._name, self._catalog = sampler, call, name, catalog
        self._texts: list[str] = []
        self._length = 0
        self._is_text = True

    def delta(self, delta: Delta) -> Sequence[Delta]:
        """Gather, and change nothing."""
        if delta.tool_calls or delta.refusal:
            self._is_text = False
        if delta.text and self._length <= LONGEST_ANSWER:
            self._texts.append(delta.text)
            self._length += len(delta.text)
        return (delta,)

    async def whole(self, whole: WholeReply) -> WholeReply:
        """Gather a reply that came whole."""
        if isinstance(whole, ChatReply) and len(whole.choices) == 1:
            message = whole.choices[0].message
            self._is_text = not (message.tool_calls or message.refusal)
            self._texts = [message.content or ""]
        return whole

    def close(self, record: UsageRecord) -> None:
        """Take the call if it ended well with a text, from the kind of model that was chosen for it by its score."""
        answer = "".join(self._texts)
        if (
            record.status is Status.ANSWERED
            and not record.is_cached
            and record.complexity is not None
            and record.model_used in self._chosen(record.route_reason)
            and self._is_text
            and 0 < len(answer) <= LONGEST_ANSWER
        ):
            self._sampler.note(self._call, self._name, self._catalog, record, answer)

    def _chosen(self, reason: str | None) -> Sequence[str]:
        route = self._catalog.auto[self._name]
        if reason == "auto_small":
            return route.small
        explores = route.shadow is not None and route.shadow.explore
        return route.large if reason == "auto_large" and explores else ()


def is_comparable(call: Call) -> bool:
    """Tell whether a call's answer can be compared with another: one answer, in text, that a client waits for, to a
    request that the other model can be asked as a chat."""
    asked = call.request
    return (
        isinstance(asked, ChatRequest)
        and asked.n in (None, 1)
        and not asked.logprobs
        and not is_spoken(asked)
        and (call.native is None or call.native.kind_of_its_own is None)
        and not any(isinstance(message, ItemMessage) for message in asked.messages)
        and call.routing.tier is Tier.INTERACTIVE
        and call.size <= LARGEST_BODY
    )


def shadow_call(
    call: Call, name: str, catalog: Catalog, record: UsageRecord, answer: str, scored_by: str
) -> ShadowCall | None:
    """Return what is noted of a call, or None where no model of the other kind can take it.

    The route itself is asked, by the name that the caller used, at quality 1, or 0 to explore: so the team's rights and
    limits hold as in any other call.
    """
    route = catalog.auto[name]
    assert isinstance(call.request, ChatRequest) and record.complexity is not None and route.shadow is not None
    asked = replace(call.request, stream=None, stream_options=None, store=None, metadata=None, n=None)
    is_explored = record.route_reason == "auto_large"
    others = route.small if is_explored else route.large
    models = [model for model in call.routing.usable(catalog.members_of(name)) if model.name in others]
    if not models:
        return None
    needs = needs_of(asked, RoutingOptions(tier=Tier.BATCH), models)
    most = max((needs.cost_most(model) for model in models if can_serve(model, needs)), default=None)
    if most is None:
        return None
    judging = 0
    if (judge := route.shadow.judge) is not None:
        judging = cost_most(longest_judge_request(judge, asked, answer), catalog.models[judge], batch=True)
    quality = 0.0 if is_explored else 1.0
    body = {**call.extra, **msgspec.to_builtins(asked), "quality": quality, "max_cost_usd": to_text(most)}
    return ShadowCall(
        request_id=call.request_id,
        team_id=record.team_id,
        key_id=record.key_id,
        route=name,
        score=record.complexity,
        form=packed_form(asked) if learns(route, record.team_id) else None,
        scored_by=scored_by,
        is_explored=is_explored,
        small_model=None if is_explored else record.model_used,
        large_model=record.model_used if is_explored else None,
        body=msgspec.json.encode(body),
        answer=answer.encode("utf-8", "replace"),
        small_nanousd=0 if is_explored else record.cost_nanousd,
        large_nanousd=record.cost_nanousd if is_explored else 0,
        reserved_nanousd=most + judging,
    )
