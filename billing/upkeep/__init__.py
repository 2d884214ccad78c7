# Loops that keep the books: flusher, owner, sweeper, audit and the repair of balances.
