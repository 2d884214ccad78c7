# What a call's end means to others: its hold is settled, metrics and trace hear of it, the target's quirks are learnt.
# And how a call ends that no target answered.

from __future__ import annotations

from msgspec.structs import replace

from billing.core.prices import cost_of
from billing.core.records import Status, UsageRecord, units_of
from gateway.calls.accounting import CallAccounting
from gateway.calls.call import Call, record_for
from gateway.calls.estimate import charged_prompt_tokens
from gateway.core.clock import Clock
from gateway.inference.admission import Admission
from gateway.inference.attempt import AttemptContext
from gateway.moderation.moderator import Moderator
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.tracing import Tracer
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.wire.quirks import Quirks
from protocol.usage import Usage
from router.catalog.targets import Target, Tier
from router.prompt_size.bounds import output_tokens_most, requests_made
from router.prompt_size.prompt_bounds import PromptBound


class CallCloser:
    """Hears how calls end."""

    def __init__(
        self,
        admission: Admission,
        providers: ProviderRegistry,
        moderator: Moderator,
        metrics: Metrics,
        tracer: Tracer | None,
        clock: Clock,
    ) -> None:
        self._admission = admission
        self._providers = providers
        self._moderator = moderator
        self._metrics = metrics
        self._tracer = tracer
        self._clock = clock

    def settle(self, account: CallAccounting) -> None:
        """Settle the hold of a call whose account is closed."""
        self._admission.settle(account)

    def note_filtered(self, call: Call) -> None:
        """Note that an upstream's own content filter ended a reply."""
        self._moderator.note_filtered(call)

    def learn(self, call: Call, target: Target, found: Quirks, record: UsageRecord) -> None:
        """Ask a target that gave a whole answer so from now on, unless it went past the limit that it was told under
        another name."""
        if record.output_tokens <= output_tokens_most(call.request, target.model):
            self._providers.quirks.learn(target, found, self._clock.monotonic())

    def close_unanswered(self, context: AttemptContext, account: CallAccounting, status: Status) -> None:
        """Close the account of a call that no target answered, whose client left first (``INTERRUPTED``), or that is
        forbidden. All but the second cost nothing."""
        call, route, log = context.call, context.route, context.log
        tried = {target.key: target for target in route.targets}
        target = tried[log.attempts[-1].target] if log.attempts else route.targets[0]
        spent = round((self._clock.monotonic() - call.started) * 1000, 3)
        attempts = tuple(log.attempts)
        record = record_for(
            call, account.hold, route, target, status, queue_ms=log.queue_ms, total_ms=spent, attempts=attempts
        )
        if status is Status.INTERRUPTED:
            record = self._with_prompt(context, target, record, account.prompt)
        account.close(record)
        if log.attempts:
            self._metrics.close(record)
            if self._tracer is not None:
                self._tracer.note(call, record)
        self._admission.settle(account)

    def _with_prompt(
        self, context: AttemptContext, target: Target, record: UsageRecord, held: PromptBound | None
    ) -> UsageRecord:
        """Return the row of a call that was left with its prompt charged. Before the first token of our own engine it
        costs nothing: its prefill may never have begun, and what left the queue used no device."""
        call = context.call
        if not context.log.has_answered and self._providers.settings(target.model.provider).self_hosted:
            return replace(record, status=Status.FAILED)
        prompt = charged_prompt_tokens(call.request, target.model, held)
        batch = call.routing.tier is Tier.BATCH
        usage = Usage(prompt, extra_requests=requests_made(call.request, target.model) - 1)
        cost = cost_of(usage, target.model.price, batch=batch, at=call.created_at)
        return replace(record, input_tokens=prompt, units=units_of(usage), cost_nanousd=cost)
