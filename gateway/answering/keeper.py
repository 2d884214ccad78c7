# Keeps running calls alive in the books: progress to the journal every second, leases of holds every five.

from __future__ import annotations

import asyncio

import structlog

from gateway.answering.account import Account

log = structlog.get_logger()

PROGRESS_EVERY = 1.0  # seconds
RENEW_EVERY = 5  # in units of PROGRESS_EVERY


class Keeper:
    """Every open account of this process, and the loop that looks after them."""

    def __init__(self) -> None:
        self._accounts: set[Account] = set()

    def __len__(self) -> int:
        return len(self._accounts)

    def add(self, account: Account) -> None:
        """Look after ``account`` from now on."""
        self._accounts.add(account)

    def remove(self, account: Account) -> None:
        """Forget ``account``; it is settled."""
        self._accounts.discard(account)

    async def run(self) -> None:
        """Note progress and renew leases until cancelled."""
        turn = 0
        while True:
            await asyncio.sleep(PROGRESS_EVERY)
            turn += 1
            running = [account for account in self._accounts if not account.is_closed]
            for account in running:
                try:
                    account.note_progress()
                except Exception:  # one call's books must not stop the others'
                    log.exception("progress_not_noted", request_id=account.hold.request.request_id)
            if turn % RENEW_EVERY == 0:
                # Together: the quotas share a trip among calls that come together.
                await asyncio.gather(*(account.renew() for account in running), return_exceptions=True)
