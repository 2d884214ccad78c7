# How much each batch brought, so that what a team has queued can be told, and items in the order in which they are due.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

OPEN = sa.text("status IN ('queued', 'running')")


def upgrade() -> None:
    """Go forward."""
    op.add_column("batches", sa.Column("input_bytes", sa.BigInteger, nullable=False, server_default=sa.text("0")))
    due = ["batch_id", sa.text("coalesce(not_before, '-infinity')"), "position"]
    op.create_index("batch_items_due_idx", "batch_items", due, postgresql_where=OPEN)
    op.drop_index("batch_items_open_idx")


def downgrade() -> None:
    """Go back."""
    op.create_index("batch_items_open_idx", "batch_items", ["batch_id", "position"], postgresql_where=OPEN)
    op.drop_index("batch_items_due_idx")
    op.drop_column("batches", "input_bytes")
