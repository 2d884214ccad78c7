# Keeps running calls alive in the books: progress to the journal every second, leases of holds every five.

from __future__ import annotations

import asyncio

from gateway.answering.account import Account

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
            for account in tuple(self._accounts):
                account.note_progress()
            if turn % RENEW_EVERY == 0:
                for account in tuple(self._accounts):
                    if not account.is_closed:
                        await account.renew()
