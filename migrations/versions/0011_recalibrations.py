# What an automatic route's quality takes for one team, as its held-back calls show it.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    op.create_table(
        "recalibrations",
        sa.Column("team_id", sa.Text, sa.ForeignKey("teams.id"), primary_key=True),
        sa.Column("route", sa.Text, primary_key=True),
        sa.Column("quality", sa.Double, nullable=False),
        sa.Column("applied", sa.Double, nullable=False),
        sa.Column("outcomes", sa.Integer, nullable=False),
        sa.Column("changed_at", sa.DateTime(timezone=True), nullable=False),
    )


def downgrade() -> None:
    """Go back."""
    op.drop_table("recalibrations")
