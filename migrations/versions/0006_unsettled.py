# How many settled calls each flusher has yet to tell the counters.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    op.add_column("flushers", sa.Column("unsettled", sa.Integer, nullable=False, server_default=sa.text("0")))


def downgrade() -> None:
    """Go back."""
    op.drop_column("flushers", "unsettled")
