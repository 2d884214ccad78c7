# Delivers the outbox to the teams' own servers, at least once; and watches budgets.
