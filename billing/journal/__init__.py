# What was promised and what was used, on local disk, until Postgres has it.
