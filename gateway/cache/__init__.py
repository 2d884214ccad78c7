# Answers that are given again to the same request: what is kept of one, and Redis, which keeps it.
