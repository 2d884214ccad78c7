# One row for each finished call in Postgres, its daily sums, corrections, engine costs and statements.
