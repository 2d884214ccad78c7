# From which day on the ledger remembers its rows: what is older can neither be compared nor booked any more.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward. Where days have lost their rows already, the memory begins with the first that has some."""
    op.create_table(
        "ledger_memory",
        sa.Column("id", sa.SmallInteger, primary_key=True, server_default=sa.text("1")),
        sa.Column("begins", sa.Date, nullable=False),
        sa.CheckConstraint("id = 1", name="ledger_memory_one_row_check"),
    )
    op.execute("""
        INSERT INTO ledger_memory (begins)
        SELECT first.day FROM (SELECT min(day) AS day FROM usage_records) AS first
        WHERE first.day > (SELECT min(day) FROM usage_daily)
    """)


def downgrade() -> None:
    """Go back."""
    op.drop_table("ledger_memory")
