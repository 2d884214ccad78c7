# What a call's end means to others: its hold is settled, metrics and trace hear of it, the target's quirks are learnt.
# And how a call ends that no target answered.

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from billing.core.prices import cost_of
from billing.core.records import Status, UsageRecord, units_of
from gateway.calls.accounting import CallAccounting
from gateway.calls.call import Call, record_for
from gateway.calls.estimate import filled_in
from gateway.contents.keeper import gathered
from gateway.contents.store import ContentStore
from gateway.core.clock import Clock
from gateway.inference.admission import Admission
from gateway.inference.attempt import AttemptContext
from gateway.moderation.moderator import Moderator
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.pace import Pace
from gateway.telemetry.tracing import Tracer
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.wire.quirks import Quirks
from router.catalog.targets import Target, Tier
from router.prompt_size.bounds import output_tokens_most
from router.prompt_size.prompt_bounds import PromptBound


class CallCloser(Struct, eq=False):
    """Hears how calls end."""

    _admission: Admission
    _providers: ProviderRegistry
    _moderator: Moderator
    _metrics: Metrics
    _contents: ContentStore
    _tracer: Tracer | None
    _clock: Clock

    def settle(self, account: CallAccounting) -> None:
        """Settle the hold of a call whose account is closed."""
        self._admission.settle(account)

    def count(self, record: UsageRecord, pace: Pace | None) -> None:
        """Count a reply that has ended, and how its stream came."""
        self._metrics.gen_ai.count(record, pace)

    def note_filtered(self, call: Call) -> None:
        """Note that an upstream's own content filter ended a reply."""
        self._moderator.note_filtered(call)

    def note_hit(self, record: UsageRecord, expected: float) -> None:
        """Note what share of a prompt was expected to be cached where it was answered."""
        self._metrics.count_hit(record, expected)

    def learn(self, call: Call, target: Target, found: Quirks, record: UsageRecord) -> None:
        """Ask a target that gave a whole answer so from now on, unless it went past the limit that it was told under
        another name."""
        if record.output_tokens <= output_tokens_most(call.request, target.model):
            self._providers.quirks.learn(target, found, self._clock.monotonic())

    def close_unanswered(self, context: AttemptContext, account: CallAccounting, status: Status) -> None:
        """Close the account of a call that no target answered, whose client left first (``INTERRUPTED``), or that is
        forbidden. All but the second cost nothing; one that no upstream heard of leaves no row, unless it is
        forbidden."""
        if account.opened is None and status is not Status.BLOCKED:
            self._admission.settle(account)
            return
        call, route, log = context.call, context.route, context.log
        target = route.targets[0]
        if log.attempts:
            last = log.attempts[-1]
            target = next(one for one in route.targets if log.is_at(one, last))
        spent = round((self._clock.monotonic() - call.started) * 1000, 3)
        attempts = log.told
        record = record_for(
            call, account.hold, route, target, status, queue_ms=log.queue_ms, total_ms=spent, attempts=attempts
        )
        if status is Status.INTERRUPTED:
            record = self._with_prompt(context, target, record, account.prompt)
        account.opened = account.opened or record
        account.close(record)
        if self._contents.keeps(call):
            self._contents.add(gathered(call, record.status))
        if log.attempts:
            self.note(call, record)
        self._admission.settle(account)

    def note(self, call: Call, record: UsageRecord) -> None:
        """Tell metrics and traces of a call that has ended without a reply of the pipeline's."""
        self._metrics.close(record)
        self._metrics.gen_ai.count(record)
        if self._tracer is not None:
            self._tracer.note(call, record)

    def _with_prompt(
        self, context: AttemptContext, target: Target, record: UsageRecord, held: PromptBound | None
    ) -> UsageRecord:
        """Return the row of a call that was left with its prompt charged. Before the first token of our own engine it
        costs nothing: its prefill may never have begun, and what left the queue used no device."""
        call = context.call
        if not context.log.has_answered and self._providers.settings(target.model.provider).self_hosted:
            return replace(record, status=Status.FAILED)
        batch = call.routing.tier is Tier.BATCH
        usage = filled_in(call.request, target.model, held, None)
        cost = cost_of(usage, target.model.price, batch=batch, at=call.created_at)
        tokens = {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens}
        return replace(record, **tokens, units=units_of(usage), cost_nanousd=cost)
