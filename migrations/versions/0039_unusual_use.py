# From where each key was used on which day, and what was unusual about a key's day: each told once.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0039"
down_revision = "0038"


def upgrade() -> None:
    """Go forward."""
    op.create_table(
        "key_networks",
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("day", sa.Date, nullable=False),
        sa.Column("network", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("key_id", "day", "network", name="key_networks_pkey"),
    )
    op.create_index("key_networks_day_idx", "key_networks", ["day"])
    op.create_table(
        "unusual_uses",
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("day", sa.Date, nullable=False),
        sa.Column("signal", sa.Text, nullable=False),
        sa.Column("team_id", sa.Text, nullable=False),
        sa.Column("details", JSONB, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
        sa.PrimaryKeyConstraint("key_id", "day", "signal", name="unusual_uses_pkey"),
        sa.ForeignKeyConstraint(["team_id"], ["teams.id"], name="unusual_uses_team_id_fkey"),
    )
    op.create_index("unusual_uses_day_idx", "unusual_uses", ["day"])


def downgrade() -> None:
    """Go back."""
    op.drop_table("unusual_uses")
    op.drop_table("key_networks")
