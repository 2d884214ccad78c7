# Batches and files in Postgres: input, claims by workers, ends, results.
