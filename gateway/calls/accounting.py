# The accounting of one call while it runs: its hold against the quotas and its entries in the journal.
# The order never changes: hold, opened, (progress), closed, bytes to the client, settled.

from __future__ import annotations

from collections.abc import Callable

from billing.core.holds import Hold, Settlement
from billing.core.records import CHARGED, Served, Status, UsageRecord, usage_of
from billing.journal.journal import Journal
from billing.quotas.quotas import Quotas
from gateway.calls.call import Call, record_for
from protocol.usage import Usage
from router.catalog.targets import Route
from router.prompt_size.prompt_bounds import PromptBound

NOTHING = Settlement(Usage(), 0)


class CallAccounting:
    """One call's hold and journal entries. ``close`` counts once; what comes later changes nothing."""

    def __init__(
        self,
        hold: Hold,
        journal: Journal,
        quotas: Quotas,
        *,
        owes_parts: bool = True,
        prompt: PromptBound | None = None,
    ) -> None:
        self.hold = hold
        self.prompt = prompt  # what the hold covers of the prompt
        self.owes_parts = owes_parts  # whether a part of an answer is owed, should this process die
        self._count: Callable[[], Settlement] = _nothing  # tells what was used so far,
        self._served: Callable[[], Served | None] = _as_opened  # and by which target, if not by the one it began with
        self.opened: UsageRecord | None = None  # as the journal knows the call while it runs
        self.record: UsageRecord | None = None  # the final one, once closed
        self._journal = journal
        self._quotas = quotas
        self._noted: tuple[Settlement, Served | None] = NOTHING, None
        self._is_left = False

    @property
    def is_closed(self) -> bool:
        """Whether nothing more is entered: the journal knows how the call ended, or its end is left to others."""
        return self.record is not None or self._is_left

    def open(self, record: UsageRecord) -> None:
        """Enter the call into the journal, before an upstream receives it. Raises JournalFull."""
        self._journal.opened(record)
        self.opened = record

    def enter(self, call: Call, route: Route, lost: Status) -> None:
        """Enter a call into the journal as the first upstream is asked, once. ``lost``: how it ends should this process
        die. Raises JournalFull."""
        if self.opened is None:
            self.open(record_for(call, self.hold, route, route.targets[0], lost))

    def follow(self, count: Callable[[], Settlement], served: Callable[[], Served | None]) -> None:
        """Ask ``count`` what was used so far and ``served`` by which target, where that is not the one the call was
        opened with: the journal knows who answers before the first word goes out."""
        self._count, self._served = count, served
        if served() is not None:
            self.note_progress()

    def owe_whole_only(self) -> None:
        """Owe no part of the answer: nothing of it is sent before it is whole."""
        self.owes_parts = False

    def note_progress(self) -> None:
        """Enter which target answers and, where parts are owed, what was used so far, if that changed."""
        if self.opened is None or self.is_closed:
            return
        used, served = self._count() if self.owes_parts else NOTHING, self._served()
        if (used, served) != self._noted:
            self._journal.progress(self.hold.request.request_id, used.usage, used.cost_nanousd, served)
            self._noted = used, served

    def close(self, record: UsageRecord) -> None:
        """Enter how the call ended. Only after this may its last bytes leave."""
        if self.is_closed:
            return
        if self.opened is not None:
            self._journal.closed(record)
        self.record = record
        self._let_go()

    def leave(self) -> None:
        """Leave hold and journal as a crash would: this process ends and cannot know what became of the call.

        The process that adopts the journal finds out from the ledger; until then the hold stays.
        """
        self._is_left = True
        self._let_go()

    def _let_go(self) -> None:
        """Drop the references to the reply: it may be freed before its accounting is settled."""
        self._count, self._served = _nothing, _as_opened

    def settle(self) -> None:
        """Replace the hold by what was used, or release it when nothing is owed."""
        if self._is_left:
            return
        record = self.record
        if record is None or self.opened is None or record.status not in CHARGED:
            self._quotas.release(self.hold)
        else:
            self._quotas.settle(self.hold, Settlement(usage_of(record), record.cost_nanousd, record.model_used))


def _nothing() -> Settlement:
    return NOTHING


def _as_opened() -> None:
    return None
