#!/bin/sh
# The role of gateways and workers, made when the volume of Postgres is new: it owns nothing. `tollgate migrate`, which runs
# as the owner, gives it what the schema takes. In a Postgres that is there already, run the statement by hand.
set -e
psql --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" <<'SQL'
\getenv password SERVICE_PASSWORD
CREATE ROLE tollgate_service LOGIN PASSWORD :'password';
SQL
