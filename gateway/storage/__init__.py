# Postgres and Redis: connections, tables, schema, encryption at rest.
