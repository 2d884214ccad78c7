# Calls that a small model answered and that are asked of a large one too.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

ZERO = sa.text("0")


def upgrade() -> None:
    """Go forward."""
    op.create_table(
        "held_back",
        sa.Column("request_id", sa.Uuid, primary_key=True),
        sa.Column("team_id", sa.Text, sa.ForeignKey("teams.id"), nullable=False),
        sa.Column("key_id", sa.Text, sa.ForeignKey("api_keys.id"), nullable=False),
        sa.Column("route", sa.Text, nullable=False),
        sa.Column("score", sa.Double, nullable=False),
        sa.Column("small_model", sa.Text, nullable=False),
        sa.Column("large_model", sa.Text),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("reason", sa.Text),
        sa.Column("body", sa.LargeBinary),
        sa.Column("answer", sa.LargeBinary),
        sa.Column("batch_id", sa.Text),
        sa.Column("position", sa.Integer),
        sa.Column("suffices", sa.Boolean),
        sa.Column("small_nanousd", sa.BigInteger, nullable=False),
        sa.Column("large_nanousd", sa.BigInteger, nullable=False, server_default=ZERO),
        sa.Column("judge_nanousd", sa.BigInteger, nullable=False, server_default=ZERO),
        sa.Column("reserved_nanousd", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
    )
    op.create_index("held_back_team_id_created_at_idx", "held_back", ["team_id", "created_at"])
    op.create_index("held_back_created_at_idx", "held_back", ["created_at"])
    is_open = sa.text("status NOT IN ('compared', 'dropped')")
    op.create_index("held_back_open_idx", "held_back", ["status"], postgresql_where=is_open)


def downgrade() -> None:
    """Go back."""
    op.drop_table("held_back")
