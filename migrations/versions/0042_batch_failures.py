# How many lines of an ended batch failed, by code: counted at the first look, kept for the others.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0042"
down_revision = "0041"


def upgrade() -> None:
    """Go forward."""
    op.add_column("batches", sa.Column("failures", sa.JSON))


def downgrade() -> None:
    """Go back."""
    op.drop_column("batches", "failures")
