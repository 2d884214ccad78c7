# Held-back calls that a large model answered and a small one is asked about, and which complexity model scored a call.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    op.add_column("held_back", sa.Column("scored_by", sa.Text))
    op.add_column("held_back", sa.Column("is_explored", sa.Boolean, nullable=False, server_default=sa.false()))
    op.alter_column("held_back", "small_model", nullable=True)


def downgrade() -> None:
    """Go back."""
    op.execute("DELETE FROM held_back WHERE small_model IS NULL")
    op.alter_column("held_back", "small_model", nullable=False)
    op.drop_column("held_back", "is_explored")
    op.drop_column("held_back", "scored_by")
