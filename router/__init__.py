# Which model answers; no network, no database.
