# Holds against every limit of a call: budgets by leases from Postgres, rates by slices from Redis.
