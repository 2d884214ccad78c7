# One request, one answer: choose, wait for a turn, admit, attempt, settle.

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from billing.core.prices import cost_of
from billing.core.records import Status, UsageRecord
from gateway.calls.accounting import Account
from gateway.calls.call import Call, record_for
from gateway.calls.estimate import charged_prompt_tokens
from gateway.core.errors import ContentPolicyViolation
from gateway.inference.admission import admit
from gateway.inference.attempt import Answering, AttemptLog
from gateway.inference.attempts import refusal, send_along_route
from gateway.inference.limiter import Turn
from gateway.inference.reply import Reply, settle
from gateway.inference.services import Services
from gateway.moderation.input_check import InputCheck, input_check_of
from gateway.upstreams.wire.errors import UpstreamFiltered
from protocol.serving.leaving import Client
from protocol.serving.off_loop import off_loop
from protocol.usage import Usage
from router import Route, choose_route
from router.catalog.targets import Target, Tier
from router.prompt_size.prompt_bounds import PromptBound
from router.ranking import Health
from router.sampling import is_sampled, judge_named

STAYS = Client()  # for calls that no client's leaving ends


async def answer(services: Services, call: Call, client: Client = STAYS) -> Reply:
    """Return the open reply to ``call``, its first token read. The caller closes it.

    Raises a ServiceError when no target may, can or does answer; then nothing is held and nothing is owed. Cancelled
    because ``client`` has left, the prompt is owed once a commercial upstream had all of it.
    """
    services.moderator.refuse_paused(call)
    if call.owes_parts:
        services.early_leaves.refuse(call.caller.key_id)
    health = services.health()
    route = await off_loop(call.size, partial(_judged_route, services, call, services.health_snapshot(health)))
    route = await services.images.fit(call.request, call.size, call.caller.team.id, route, services.providers)
    gate = services.gate
    if (away := refusal(services, call, route, health)) is not None and not gate.can_wait(route):
        raise away
    turn = gate.enter(call, route, health) if away is None else None
    turn = turn or await gate.wait(call, route, health)
    try:
        return await _answer_in_turn(services, call, turn, client)
    except BaseException:
        gate.release(turn.slot)
        raise


def _judged_route(services: Services, call: Call, snapshot: Health) -> Route:
    route = route_of(services, call, snapshot)
    if is_sampled(call.request_id):
        route = judge_named(route, call.request, call.routing, services.catalog, services.complexity)
    return route


def route_of(services: Services, call: Call, snapshot: Health) -> Route:
    """Return the route of a call, by what is known of the targets now. Raises as ``choose_route`` does."""
    catalog = services.catalog
    share = call.share if catalog.meaning(call.request.model) in catalog.auto else 0.0
    spread = call.spread if catalog.is_replicated else 0.0
    return choose_route(
        *(call.request, call.routing, catalog, snapshot, services.complexity),
        share=share,
        spread=spread,
        at=call.created_at,
    )


async def _answer_in_turn(services: Services, call: Call, turn: Turn, client: Client) -> Reply:
    """Hold, ask, and return the open reply. Who waits holds nothing: its hold would refuse its team's other calls."""
    check = input_check_of(services.moderator, call)
    try:
        return await _answer_checked(services, call, turn, check, client)
    finally:
        if check is not None:
            check.stop()


async def _answer_checked(
    services: Services, call: Call, turn: Turn, check: InputCheck | None, client: Client
) -> Reply:
    route = turn.route
    call, account = await admit(services, call, route)
    log = AttemptLog(queued=turn.waited)
    answering: Answering | None = None

    async def send() -> Answering:
        nonlocal answering
        answering = await send_along_route(services, call, route, log, turn.slot)
        return answering

    try:
        lost = Status.SUPERSEDED if call.is_batch_item else Status.FAILED  # should this process die
        account.open(record_for(call, account.hold, route, route.targets[0], lost))
        answered = await (send() if check is None else check.beside(send))
        try:
            reply = Reply(services, call, route, account, answered, log, services.hooks)
        except BaseException:
            answering = None
            answered.close()
            raise
    except BaseException as exc:
        if isinstance(exc, UpstreamFiltered):
            services.moderator.note_filtered(call)
        verdict = exc if check is None or check.violation is None else check.violation  # it may coincide with a leaving
        is_forbidden = isinstance(verdict, ContentPolicyViolation)
        is_left = client.has_left and call.owes_parts and (log.was_left_waiting or log.has_answered)
        if answering is not None and (is_forbidden or (is_left and answering.whole is not None)):
            reply = Reply(services, call, route, account, answering, log, services.hooks)
            (reply.block if is_forbidden else reply.abandon)()
            reply.close()
        elif is_left and not is_forbidden:
            services.early_leaves.count(call.caller.key_id, call.started)
            _close_unanswered(services, account, call, route, log, Status.INTERRUPTED)
        else:
            status = Status.BLOCKED if is_forbidden else Status.FAILED
            _close_unanswered(services, account, call, route, log, status)
        raise
    services.early_leaves.forget_one(call.caller.key_id)
    if check is not None and check.violation is not None:
        if isinstance(check.violation, ContentPolicyViolation):
            reply.block()
        reply.close()
        raise check.violation
    return reply


def _with_prompt(
    services: Services, call: Call, target: Target, record: UsageRecord, log: AttemptLog, held: PromptBound | None
) -> UsageRecord:
    """Return the row of a call that was left with its prompt charged. Before the first token of our own engine it costs
    nothing: its prefill may never have begun, and what left the queue used no device."""
    if not log.has_answered and services.providers.settings(target.model.provider).self_hosted:
        return replace(record, status=Status.FAILED)
    prompt = charged_prompt_tokens(call.request, target.model, held)
    batch = call.routing.tier is Tier.BATCH
    cost = cost_of(Usage(prompt), target.model.price, batch=batch, at=call.created_at)
    return replace(record, input_tokens=prompt, cost_nanousd=cost)


def _close_unanswered(
    services: Services, account: Account, call: Call, route: Route, log: AttemptLog, status: Status
) -> None:
    """Close the account of a call that no target answered, whose client left first (``INTERRUPTED``), or that is
    forbidden. All but the second cost nothing."""
    tried = {target.key: target for target in route.targets}
    target = tried[log.attempts[-1].target] if log.attempts else route.targets[0]
    spent = round((services.clock.monotonic() - call.started) * 1000, 3)
    attempts = tuple(log.attempts)
    record = record_for(
        call, account.hold, route, target, status, queue_ms=log.queue_ms, total_ms=spent, attempts=attempts
    )
    if status is Status.INTERRUPTED:
        record = _with_prompt(services, call, target, record, log, account.prompt)
    account.close(record)
    if log.attempts:
        services.metrics.close(record)
        if services.tracer is not None:
            services.tracer.note(call, record)
    settle(services, account)
