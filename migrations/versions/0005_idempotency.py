# What stored answers need: leases are renewed by request id, and headers are kept inside the encrypted answer.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    op.create_index(
        "idempotency_running_idx",
        "idempotency",
        ["request_id"],
        unique=False,
        postgresql_where=sa.text("lease_until IS NOT NULL"),
    )
    op.drop_column("idempotency", "headers")


def downgrade() -> None:
    """Go back."""
    op.add_column("idempotency", sa.Column("headers", postgresql.JSONB()))
    op.drop_index("idempotency_running_idx", table_name="idempotency")
