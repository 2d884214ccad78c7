# Lines of batches that travel by their provider's Batch API: what a call is before it is put there, checked, routed and
# written as any other; and its reply when the provider has answered, which is read, checked, stored and booked as any
# other. Between the two lie hours, and perhaps another process: what it holds is in a reservation (billing/quotas).

from __future__ import annotations

from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from billing.core.holds import Hold, HoldRequest
from billing.core.records import Status, UsageRecord
from gateway.calls.answering import Answering
from gateway.calls.call import Call, record_for, value_scopes_of
from gateway.calls.hooks import KeepEnding
from gateway.core.clock import Clock
from gateway.core.errors import ContentPolicyViolation
from gateway.inference.answer import Inference
from gateway.inference.attempt import AttemptLog
from gateway.inference.edition import Edition
from gateway.inference.reply import Reply
from gateway.moderation.input_check import input_check_of
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.provider_batches import ProviderBatches
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.team_keys import brings_keys
from gateway.upstreams.wire.base import UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamFailure
from protocol.errors import ServiceError
from protocol.serving.off_loop import off_loop
from router.catalog.targets import Route, Target
from router.prompt_size.bounds import is_spoken, requests_made


class PreparedLine(Struct, frozen=True):
    """A call that may go to its provider's Batch API: where, what it would be sent, and what it holds."""

    target: Target  # at the price of batches
    route: Route
    built: UpstreamRequest
    hold: HoldRequest


class ForbiddenLine(Struct, frozen=True):
    """A call that the content policy forbids, and its row."""

    violation: ContentPolicyViolation
    record: UsageRecord


class _Nothing:
    def close(self) -> None:
        """Nothing was begun."""


class ProviderLines:
    """Prepares lines for Batch APIs, and opens the replies of those that were answered there."""

    def __init__(self, inference: Inference, providers: ProviderRegistry, batches: ProviderBatches) -> None:
        self.batches = batches
        self._chooser = inference.chooser
        self._admission = inference.admission
        self._dispatcher = inference.dispatcher
        self._replies = inference.replies
        self._cache = inference.replies.cache
        self._moderator = inference.moderator
        self._providers = providers

    def goes_by_own_key(self, call: Call) -> bool:
        """Whether a call is asked with its team's own key first: how it fares tells little of the calls of others."""
        if not brings_keys(call.caller.team, self._providers):
            return False
        try:
            return self._chooser.route_of(call, {}).targets[0].own is not None
        except ServiceError:
            return False

    async def prepare(self, call: Call) -> PreparedLine | ForbiddenLine | None:
        """Return what a call would be sent in a batch of its provider; ``None``: it is to be an ordinary call.

        Raises a ServiceError where it may not be sent at all, as ``Inference.answer`` does.
        """
        self._moderator.refuse_paused(call)
        call = await self._moderator.redacted(call)
        if value_scopes_of(call):
            return None  # reservations are counted for teams, keys and models
        route = await self._chooser.choose(call, self._chooser.health(call.caller.team))
        if (target := self._target_of(call, route)) is None:
            return None
        if self._cache.takes(call) and (await self._cache.look(call, route)).kept is not None:
            return None
        asked = replace(route, targets=(target,))
        hold = await self._admission.most_of(call, asked)
        try:
            built = await self._dispatcher.build(call, asked)
        except UpstreamFailure:
            return None  # another target of its route may have the words for it
        check = input_check_of(self._moderator, call)
        if check is not None:
            try:
                await check.send_and_judge(_nothing)
            except ContentPolicyViolation as exc:
                return ForbiddenLine(exc, record_for(call, Hold(request=hold), asked, target, Status.BLOCKED))
            finally:
                check.stop()
        return PreparedLine(target, asked, built, hold)

    async def open(
        self, call: Call, route: Route, hold: Hold, body: bytes, dropped: tuple[str, ...], keep: KeepEnding[Reply]
    ) -> Reply:
        """Return the open reply to a call that its provider has answered with ``body``; the caller closes it.

        ``keep`` stores its row: neither hold nor journal of this process knows the call. Raises UpstreamFailure for an
        answer that cannot be read.
        """
        target = route.targets[0]
        provider = self._providers.settings_at(target)
        wire = self._providers.format(target.model.provider)
        whole, usage = await off_loop(len(body), partial(wire.read_reply, call.request, body))
        answering = Answering(target, provider, [], whole=whole, usage=usage, dropped=dropped)
        context = self._dispatcher.begin(call, route, AttemptLog())
        context.log.add(target, "ok", 0.0)
        return self._replies.open(context, self._admission.reserved(call, hold), answering, keep)

    def _target_of(self, call: Call, route: Route) -> Target | None:
        """Return where a call goes in a batch: to the model that its route begins with, or ``None``."""
        message = call.as_message
        if call.service_tier is not None or is_spoken(call.request):
            return None  # it is answered now, at a price for that
        if message is not None and (message.is_kept_an_hour or message.betas or message.run_upstream):
            return None  # a price of its own; and a batch has one set of headers
        first = route.targets[0].model.name
        for target in (each for each in route.targets if each.model.name == first):
            price = target.model.batch_price
            if price is None or requests_made(call.request, target.model) > 1:
                continue
            if self.batches.wire_of(target).takes(call.request):
                model = replace(target.model, price=price, batch_price=None, others=())
                return Target(model, target.endpoint, target.own)
        return None


def lines_of(edition: Edition, client: UpstreamClient, clock: Clock) -> ProviderLines:
    """Return what prepares and opens lines by an edition of the configuration."""
    batches = ProviderBatches(edition.providers, client, clock)
    return ProviderLines(edition.inference, edition.providers, batches)


async def _nothing() -> _Nothing:
    return _Nothing()
