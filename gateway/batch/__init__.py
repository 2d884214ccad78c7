# Batches and files in Postgres: what comes in, who claims it, how it ends, what comes out.
