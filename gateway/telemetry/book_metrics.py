# What the parts of the accounting count themselves: quotas, journal, sweeper, failovers and the audit.

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.telemetry.meters import ALL, WORST, Meters, Rises, counter, gauge, make_rows

if TYPE_CHECKING:
    from gateway.storage.books import Books


class BookMetrics:
    """Metrics of the accounting. They show nothing before ``follow``."""

    backlog = gauge("tollgate_journal_backlog", "Closed calls that are not in Postgres yet", of=ALL)
    standalone = gauge(
        "tollgate_quotas_standalone",
        "1 while Postgres or Redis is away and calls go on inside what this process has drawn",
        of=WORST,
    )
    exceeded = counter("tollgate_hold_exceeded_total", "Calls billed above their hold")
    differ = gauge(
        "tollgate_books_differ", "Figures of the ledger that a book does not share, by the last audit", "book", of=WORST
    )
    compared = gauge("tollgate_books_compared", "Lines, leases and balances that the last audit compared", of=WORST)
    audited = gauge(
        "tollgate_books_audited_timestamp_seconds", "When the books were last compared; 0: not yet", of=WORST
    )
    damaged = counter(
        "tollgate_journals_damaged_total", "Journal files with places that could not be read, kept for people"
    )
    quarantined = gauge(
        "tollgate_journal_files_quarantined",
        "Journal files that wait for people: damaged, too old for the ledger, or refused by it",
        of=WORST,
    )
    lost = counter("tollgate_journals_lost_total", "Journals not heard of for an hour: days closed without them")
    swept = counter("tollgate_holds_swept_total", "Dead processes whose holds went back")
    rebuilds = counter("tollgate_rebuilds_total", "Times that Postgres had forgotten something, and was told again")
    refusals = counter("tollgate_redis_refusals_total", "Commands about rates that Redis refused")

    def __init__(self, meters: Meters) -> None:
        make_rows(self, meters)
        self._rises = Rises()
        self._books: Books | None = None

    def follow(self, books: Books) -> None:
        """Show from now on what these count."""
        self._books = books

    def refresh(self) -> None:
        """Take over what they have counted by now."""
        books = self._books
        if books is None:
            return
        quotas, journal, auditor = books.quotas, books.journal, books.auditor
        self.standalone.set(quotas.is_standalone)
        self.backlog.set(journal.backlog)
        self.quarantined.set(journal.quarantined)
        self.differ.labels("statements").set(auditor.found.statements)
        self.differ.labels("counters").set(auditor.found.counters)
        self.compared.set(auditor.found.books)
        self.audited.set(auditor.found.at)
        self._rises.follow(self.exceeded, quotas.exceeded)
        self._rises.follow(self.refusals, quotas.rates.refusals)
        self._rises.follow(self.rebuilds, books.owner.recovered)
        self._rises.follow(self.swept, books.owner.buried)
        self._rises.follow(self.lost, books.sweeper.lost)
        self._rises.follow(self.damaged, journal.damaged)
