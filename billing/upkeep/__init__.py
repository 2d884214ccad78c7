# Background loops of the accounting: flusher, owner, sweeper, audit and the repair of balances.
