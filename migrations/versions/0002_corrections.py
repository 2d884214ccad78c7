# Corrections that people book.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    op.create_table(
        "corrections",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("booked_on", sa.Date(), nullable=False),
        sa.Column("key_id", sa.Text()),
        sa.Column("model_used", sa.Text()),
        sa.Column("tier", sa.Text()),
        sa.Column("request_id", sa.Uuid()),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="corrections_pkey"),
    )
    op.create_index("corrections_team_id_day_idx", "corrections", ["team_id", "day"], unique=False)
    op.create_index("corrections_day_idx", "corrections", ["day"], unique=False)


def downgrade() -> None:
    """Go back."""
    op.drop_table("corrections")
