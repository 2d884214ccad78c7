# The privileges of gateways and workers, where they have a role of their own: rows of every table, but nothing of the
# ledger, its prices, the corrections and the audit log is changed or deleted, no table is made, altered or dropped.

from __future__ import annotations

from sqlalchemy import Connection, text

from billing.ledger.partitions import LOCK
from billing.ledger.tables import metadata

SERVICE_ROLE = "tollgate_service"
ADDED_TO_ALONE = ("usage_records", "corrections", "audit_log", "price_editions")

EXISTS = text("SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = :role)")


def grant_to_service(connection: Connection) -> None:
    """Give the service role what the newest schema takes, where there is such a role. Other grants of it end."""
    if not connection.execute(EXISTS, {"role": SERVICE_ROLE}).scalar_one():
        return
    connection.execute(LOCK)  # no other migration grants meanwhile, and no partition is made
    rows = [name for name in metadata.tables if name not in ADDED_TO_ALONE]
    for statement in (
        "REVOKE ALL ON ALL TABLES IN SCHEMA public FROM {role}",
        "GRANT USAGE ON SCHEMA public TO {role}",
        "GRANT SELECT ON alembic_version, usage_records_rest TO {role}",
        f"GRANT SELECT, INSERT ON {', '.join(ADDED_TO_ALONE)} TO {{role}}",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {', '.join(rows)} TO {{role}}",
        "GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {role}",
        "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA public TO {role}",
    ):
        connection.execute(text(statement.format(role=SERVICE_ROLE)))
