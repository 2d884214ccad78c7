# Answers kept for calls that carry an Idempotency-Key.
