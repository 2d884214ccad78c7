# What answers from the cache saved, and which keys' calls go by it.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    for table in ("usage_records", "usage_daily"):
        op.add_column(table, sa.Column("saved_nanousd", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("api_keys", sa.Column("cache", sa.Text))


def downgrade() -> None:
    """Go back."""
    op.drop_column("api_keys", "cache")
    for table in ("usage_daily", "usage_records"):
        op.drop_column(table, "saved_nanousd")
