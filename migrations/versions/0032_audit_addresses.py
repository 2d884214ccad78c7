# The audit log has the address and the reason of an act, and can be read on without missing an entry that is committed
# late: who adds one holds a lock, shared, that a reader waits for.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"

# Before the statement takes its numbers.
HOLD = """
    CREATE FUNCTION hold_audit_log() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM pg_advisory_xact_lock_shared(hashtext('audit_log'));
        RETURN NULL;
    END $$
"""
ADDED = """
    CREATE TRIGGER hold_audit_log BEFORE INSERT ON audit_log FOR EACH STATEMENT EXECUTE FUNCTION hold_audit_log()
"""


def upgrade() -> None:
    """Go forward."""
    op.add_column("audit_log", sa.Column("address", sa.Text))
    op.add_column("audit_log", sa.Column("reason", sa.Text))
    op.execute(HOLD)
    op.execute(ADDED)


def downgrade() -> None:
    """Go back."""
    op.execute("DROP TRIGGER hold_audit_log ON audit_log")
    op.execute("DROP FUNCTION hold_audit_log()")
    op.drop_column("audit_log", "reason")
    op.drop_column("audit_log", "address")
