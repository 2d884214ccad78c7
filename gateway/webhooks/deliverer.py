# The deliverer: what is due in the outbox goes out, many at once and each in its turn. Every worker runs one. Claiming
# and recording are short transactions; none is open while a receiver takes its time.

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime

import structlog
from msgspec import Struct, field

from billing.core.store_errors import told_if_away
from gateway.accounts.team_secrets import load_secrets
from gateway.core.background import stop_all
from gateway.core.clock import Clock
from gateway.outbox.schedule import Delivered, DeliveryResult, GiveUp, NextStep, TryAgain, next_step
from gateway.outbox.signing import signed_headers
from gateway.outbox.store import ClaimedCallback, claim_due, drop_old, give_back, record_try
from gateway.storage.database import Database
from gateway.storage.encryption import Sealer
from gateway.webhooks.sender import Sender

EVERY = 1.0  # seconds between looks at the outbox
WHILE_BUSY = 0.1  # seconds, after one that found something
SHARE = 0.1  # of one connection's time that looking may take: a long queue is looked at less often
AT_ONCE = 64  # tries, by one worker
KEEP_FOR = 30 * 86400.0  # seconds that a finished callback stays to be looked at
TIDY_EVERY = 3600.0  # seconds
END_WITHIN = 3.0  # seconds for tries that run when the worker ends

NO_SECRET = DeliveryResult(error="The team has no usable webhook secret to sign with: create one.")

log = structlog.get_logger()


class Deliverer(Struct, eq=False):
    """Delivers callbacks until it is told to finish. ``dice`` spreads the waits."""

    _database: Database
    _clock: Clock
    _sender: Sender
    _sealer: Sealer
    _dice: Callable[[], float] = random.random
    _owner: str = field(default_factory=lambda: f"worker-{secrets.token_hex(8)}")
    _running: dict[asyncio.Task[None], ClaimedCallback] = {}
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)  # deliveries share the worker's few connections

    async def run(self) -> None:
        """Deliver what is due, for ever; being cancelled leaves what runs to ``finish``."""
        tidied_at = -TIDY_EVERY
        while True:
            began, pause = time.monotonic(), EVERY
            with told_if_away(log, "outbox_unreachable"):
                if await self.start_due():
                    pause = WHILE_BUSY
                if self._clock.monotonic() - tidied_at >= TIDY_EVERY:
                    tidied_at = self._clock.monotonic()
                    await self._tidy()
            await asyncio.sleep(max(pause, (time.monotonic() - began) / SHARE))

    async def start_due(self) -> int:
        """Claim what is due and may run now, and start trying; return how many."""
        room = AT_ONCE - len(self._running)
        if room <= 0:
            return 0
        running = list(self._running.values())
        now = self._clock.now()
        async with self._one_at_a_time, self._database.begin() as connection:
            claimed = await claim_due(connection, owner=self._owner, now=now, running=running, at_most=room)
            keys = await load_secrets(connection, self._sealer, [each.team_id for each in claimed]) if claimed else {}
        for each in claimed:
            task = asyncio.create_task(self._deliver(each, keys.get(each.team_id, [])))
            self._running[task] = each
            task.add_done_callback(self._done)
        return len(claimed)

    async def finish(self, seconds: float = END_WITHIN) -> None:
        """Wait for what runs, at most ``seconds``; give the rest back, to be tried by others."""
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)
        await stop_all(list(self._running))
        with told_if_away(log, "outbox_unreachable"):  # the leases run out by themselves
            async with self._database.begin() as connection:
                await give_back(connection, self._owner)

    async def _deliver(self, claimed: ClaimedCallback, keys: list[bytes]) -> None:
        result = await self._try(claimed, keys)
        now = self._clock.now()
        step = next_step(result, claimed.tries, now, claimed.expires_at, self._dice())
        _tell(claimed, result, step)
        # Should it not be recorded, the lease runs out, and it is tried again: at least once.
        with told_if_away(log, "callback_not_recorded", callback_id=claimed.id):
            async with self._one_at_a_time, self._database.begin() as connection:
                await record_try(connection, claimed, result, step, owner=self._owner, now=now)

    async def _try(self, claimed: ClaimedCallback, keys: list[bytes]) -> DeliveryResult:
        if not keys:
            return NO_SECRET
        now = self._clock.now()
        try:
            return await self._sender.send(
                claimed.url, signed_headers(claimed.id, claimed.body, keys, now), claimed.body, now
            )
        except Exception as exc:  # one callback must not end the deliverer
            log.exception("callback_broke", callback_id=claimed.id)
            return DeliveryResult(error=f"It could not be sent: {type(exc).__name__}.")

    def _done(self, task: asyncio.Task[None]) -> None:
        claimed = self._running.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:  # its lease runs out
            log.error("callback_broke", callback_id=claimed.id, error=repr(error), exc_info=error)

    async def _tidy(self) -> None:
        async with self._database.begin() as connection:
            if dropped := await drop_old(connection, self._clock.now() - KEEP_FOR):
                log.info("callbacks_dropped", count=dropped)


def _tell(claimed: ClaimedCallback, result: DeliveryResult, step: NextStep) -> None:
    facts = {
        "callback_id": claimed.id,
        "type": claimed.event,
        "team_id": claimed.team_id,
        "receiver": claimed.receiver,
        "tries": claimed.tries,
        "status": result.status,
    }
    match step:
        case Delivered():
            log.info("callback_delivered", **facts)
        case TryAgain(at):
            log.warning("callback_failed", **facts, reason=result.error, next_try_at=_text(at))
        case GiveUp():
            log.error("callback_given_up", **facts, reason=result.error)


def _text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
