# Keeps running calls alive in the books: progress to the journal every second, leases of holds every five. Each call
# has its moment within these, so that a thousand books never keep one token waiting.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count

import structlog

from gateway.answering.account import Account

log = structlog.get_logger()

SLICE = 0.1  # seconds
PROGRESS_EVERY = 10  # slices
RENEW_EVERY = 50  # slices


class Keeper:
    """Every open account of this process, and the loops that look after them."""

    def __init__(self) -> None:
        self._accounts: dict[Account, int] = {}  # and which slice is theirs
        self._places = count()

    def __len__(self) -> int:
        return len(self._accounts)

    def add(self, account: Account) -> None:
        """Look after ``account`` from now on."""
        self._accounts[account] = next(self._places)

    def remove(self, account: Account) -> None:
        """Forget ``account``; it is settled."""
        self._accounts.pop(account, None)

    async def run(self) -> None:
        """Note progress and renew leases until cancelled."""
        async with asyncio.TaskGroup() as both:
            both.create_task(self._note_progress())
            both.create_task(self._renew_leases())

    async def _note_progress(self) -> None:
        async for accounts in self._slices(PROGRESS_EVERY):
            for account in accounts:
                try:
                    account.note_progress()
                except Exception:  # one call's books must not stop the others'
                    log.exception("progress_not_noted", request_id=account.hold.request.request_id)

    async def _renew_leases(self) -> None:
        async for accounts in self._slices(RENEW_EVERY):
            # Together: the quotas share a trip among calls that come together.
            await asyncio.gather(*(account.renew() for account in accounts), return_exceptions=True)

    async def _slices(self, every: int) -> AsyncIterator[list[Account]]:
        """Yield, slice by slice, the accounts whose turn it is: each once in ``every`` slices."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        for turn in count():
            due = max(due + SLICE, loop.time())  # what was late is not made up for
            await asyncio.sleep(due - loop.time())
            its = [account for account, place in self._accounts.items() if (place + turn) % every == 0]
            yield [account for account in its if not account.is_closed]
