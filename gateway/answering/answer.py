# One request, one answer: choose, admit, attempt, settle.

from __future__ import annotations

from random import random

from billing.records import Status
from gateway.answering.account import Account
from gateway.answering.admission import admit
from gateway.answering.attempts import AttemptLog, refusal, send_along_route
from gateway.answering.call import Call, record_for
from gateway.answering.reply import Reply, settle
from gateway.services import Services
from router import Route, choose_route
from router.sampling import is_sampled, judge_named


async def answer(services: Services, call: Call) -> Reply:
    """Return the open reply to ``call``, its first token read. The caller closes it.

    Raises a ServiceError when no target may, can or does answer; then nothing is held and nothing is owed.
    """
    share = random()
    health = services.health()
    route = choose_route(call.request, call.wish, services.catalog, health, services.complexity, share=share)
    if is_sampled(call.request_id):
        route = judge_named(route, call.request, call.wish, services.catalog, services.complexity)
    if (away := refusal(services, route, health)) is not None:
        raise away
    account = await admit(services, call, route)
    log = AttemptLog()
    try:
        account.open(record_for(call, route, route.targets[0], Status.FAILED))
        answering = await send_along_route(services, call, route, log)
        try:
            return Reply(services, call, route, account, answering, log, services.hooks)
        except BaseException:
            services.background.spawn(answering.close())
            raise
    except BaseException:
        _close_unanswered(services, account, call, route, log)
        raise


def _close_unanswered(services: Services, account: Account, call: Call, route: Route, log: AttemptLog) -> None:
    """Close the books of a call that no target answered, or whose client left first: a row that costs nothing."""
    tried = {target.key: target for target in route.targets}
    target = tried[log.attempts[-1].target] if log.attempts else route.targets[0]
    spent = round((services.clock.monotonic() - call.started) * 1000, 3)
    record = record_for(call, route, target, Status.FAILED, total_ms=spent, attempts=tuple(log.attempts))
    account.close(record)
    if log.attempts:
        services.metrics.close(record)
    services.background.spawn(settle(services, account))
