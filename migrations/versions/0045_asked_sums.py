# Calls by the name that they asked for, added up once a day is closed: what automatic routes saved is told from these.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0045"
down_revision = "0044"

KEY = (("day", sa.Date), ("team_id", sa.Text), ("model_asked", sa.Text), ("tier", sa.Text), ("score", sa.SmallInteger))
SUMS = (
    "requests", "input_tokens", "cached_input_tokens", "cache_write_tokens", "output_tokens", "reasoning_tokens",
    "cost_nanousd",
)  # fmt: skip


def upgrade() -> None:
    """Go forward."""
    op.create_table(
        "usage_asked",
        *[sa.Column(name, kind, primary_key=True) for name, kind in KEY],
        *[sa.Column(name, sa.BigInteger, nullable=False, server_default="0") for name in SUMS],
    )
    op.add_column("closed_days", sa.Column("summed_at", sa.DateTime(timezone=True)))


def downgrade() -> None:
    """Go back."""
    op.drop_column("closed_days", "summed_at")
    op.drop_table("usage_asked")
