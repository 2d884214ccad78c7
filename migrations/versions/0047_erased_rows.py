# Rows of deleted teams go in great numbers: what refers to them is found by an index, and not by reading a whole table
# for each of them.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0047"
down_revision = "0046"

REFERRING = (("batches", "input_file_id"), ("callbacks", "batch_id"), ("budget_alerts", "callback_id"))


def upgrade() -> None:
    """Go forward."""
    for table, column in REFERRING:
        where = sa.text(f"{column} IS NOT NULL")
        op.create_index(f"{table}_{column}_idx", table, [column], postgresql_where=where)


def downgrade() -> None:
    """Go back."""
    for table, column in REFERRING:
        op.drop_index(f"{table}_{column}_idx", table)
