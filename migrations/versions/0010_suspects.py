# How often each request of a batch was lost with its worker, so that one which kills workers comes to an end.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

LOST = sa.text("losses > 0 AND status IN ('queued', 'running')")


def upgrade() -> None:
    """Go forward."""
    op.add_column("batch_items", sa.Column("losses", sa.SmallInteger, nullable=False, server_default=sa.text("0")))
    op.create_index("batch_items_lost_idx", "batch_items", ["batch_id", "position"], postgresql_where=LOST)


def downgrade() -> None:
    """Go back."""
    op.drop_index("batch_items_lost_idx")
    op.drop_column("batch_items", "losses")
