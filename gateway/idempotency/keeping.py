# Stores what a call came to until Postgres says that it is stored, or that it is not to be.

from __future__ import annotations

import asyncio

import structlog

from billing.core.records import UsageRecord
from billing.core.store_errors import POSTGRES_AWAY, postgres_refuses
from gateway.core.errors import Unavailable
from gateway.idempotency.store import Also, IdempotencyStore
from gateway.idempotency.stored_answers import Claim, StoredAnswer

MOST_REFUSALS = 5  # times that Postgres may refuse to store an answer before it is given up

log = structlog.get_logger(__name__)


async def keep_until_known(
    store: IdempotencyStore, claim: Claim, answer: StoredAnswer, record: UsageRecord | None, also: Also | None = None
) -> bool:
    """Store an answer; return False if the call is another's now. Raises Unavailable when Postgres refuses it.

    While Postgres is away it is unknown whether it was stored, so this goes on until Postgres says. A refusal says
    nothing of an earlier try that broke off: only the row tells whether that was stored, and charged.
    """
    pause, refusals = 0.1, 0
    while True:
        try:
            if refusals < MOST_REFUSALS:
                return await store.store(claim, answer, record, also)
            if await store.is_stored(claim):
                return True
            break
        except POSTGRES_AWAY as exc:
            log.warning("idempotent_answer_not_stored_yet", request_id=claim.request_id, error=repr(exc))
            refusals += postgres_refuses(exc)
        await asyncio.sleep(pause)
        pause = min(2.0, 2 * pause)
    log.error("idempotent_answer_refused", request_id=claim.request_id)
    raise Unavailable("The answer could not be stored. It costs nothing. Try again.")
