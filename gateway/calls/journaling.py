# Keeps running calls in the journal: their progress, every second. Each call has its moment within it, so that a
# thousand open accounts never delay a token.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count

import structlog

from gateway.calls.accounting import CallAccounting

log = structlog.get_logger()

SLICE = 0.1  # seconds
PROGRESS_EVERY = 10  # slices


class OpenCalls:
    """Every open account of this process, and the loop that looks after them."""

    def __init__(self) -> None:
        self._accounts: dict[CallAccounting, int] = {}  # and which slice is theirs
        self._places = count()

    def __len__(self) -> int:
        return len(self._accounts)

    def add(self, account: CallAccounting) -> None:
        """Look after ``account`` from now on."""
        self._accounts[account] = next(self._places)

    def remove(self, account: CallAccounting) -> None:
        """Forget ``account``; it is settled."""
        self._accounts.pop(account, None)

    async def run(self) -> None:
        """Note progress until cancelled."""
        async for accounts in self._slices(PROGRESS_EVERY):
            for account in accounts:
                try:
                    account.note_progress()
                except Exception:  # one call's accounting must not stop the others'
                    log.exception("progress_not_noted", request_id=account.hold.request.request_id)

    async def _slices(self, every: int) -> AsyncIterator[list[CallAccounting]]:
        """Yield, slice by slice, the accounts whose turn it is: each once in ``every`` slices."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        for turn in count():
            due = max(due + SLICE, loop.time())  # what was late is not made up for
            await asyncio.sleep(due - loop.time())
            its = [account for account, place in self._accounts.items() if (place + turn) % every == 0]
            yield [account for account in its if not account.is_closed]
