# What the parts of the accounting count themselves: quotas, journal, sweeper, failovers and the audit.

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.telemetry.meters import Meters, Rises

if TYPE_CHECKING:
    from gateway.storage.books import Books


class BookMetrics:
    """Metrics of the accounting. They show nothing before ``follow``."""

    def __init__(self, meters: Meters) -> None:
        self._journal_backlog = meters.gauge_of_all(
            "tollgate_journal_backlog", "Closed calls that are not in Postgres yet"
        )
        self._quotas_standalone = meters.gauge_of_worst(
            "tollgate_quotas_standalone",
            "1 while Postgres or Redis is away and calls go on inside what this process has drawn",
        )
        self._hold_exceeded = meters.counter("tollgate_hold_exceeded_total", "Calls billed above their hold")
        self._books_differ = meters.gauge_of_worst(
            "tollgate_books_differ", "Figures of the ledger that a book does not share, by the last audit", "book"
        )
        self._books_compared = meters.gauge_of_worst(
            "tollgate_books_compared", "Lines, leases and balances that the last audit compared"
        )
        self._books_audited = meters.gauge_of_worst(
            "tollgate_books_audited_timestamp_seconds", "When the books were last compared; 0: not yet"
        )
        self._journals_damaged = meters.counter(
            "tollgate_journals_damaged_total", "Journal files with places that could not be read, kept for people"
        )
        self._journal_quarantined = meters.gauge_of_worst(
            "tollgate_journal_files_quarantined",
            "Journal files that wait for people: damaged, too old for the ledger, or refused by it",
        )
        self._journals_lost = meters.counter(
            "tollgate_journals_lost_total", "Journals not heard of for an hour: days closed without them"
        )
        self._holds_swept = meters.counter("tollgate_holds_swept_total", "Dead processes whose holds went back")
        self._rebuilds = meters.counter(
            "tollgate_rebuilds_total", "Times that Postgres had forgotten something, and was told again"
        )
        self._redis_refusals = meters.counter(
            "tollgate_redis_refusals_total", "Commands about rates that Redis refused"
        )
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
        self._quotas_standalone.set(quotas.is_standalone)
        self._journal_backlog.set(journal.backlog)
        self._journal_quarantined.set(journal.quarantined)
        self._books_differ.labels("statements").set(auditor.found.statements)
        self._books_differ.labels("counters").set(auditor.found.counters)
        self._books_compared.set(auditor.found.books)
        self._books_audited.set(auditor.found.at)
        self._rises.follow(self._hold_exceeded, quotas.exceeded)
        self._rises.follow(self._redis_refusals, quotas.rates.refusals)
        self._rises.follow(self._rebuilds, books.owner.recovered)
        self._rises.follow(self._holds_swept, books.owner.buried)
        self._rises.follow(self._journals_lost, books.sweeper.lost)
        self._rises.follow(self._journals_damaged, journal.damaged)
