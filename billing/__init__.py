# Who owes what: money, prices, holds, journal, ledger, statements.
