# Budget alerts and their webhooks.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

RECEIVER = sa.Computed("substring(url, '://([^/?#]+)')", persisted=True)
IN_A_DAY = sa.text("now() + interval '24 hours'")


def upgrade() -> None:
    """Go forward."""
    op.add_column("teams", sa.Column("webhook_url", sa.Text()))
    op.add_column("callbacks", sa.Column("receiver", sa.Text(), RECEIVER))
    op.add_column(
        "callbacks", sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False, server_default=IN_A_DAY)
    )
    op.create_table(
        "budget_alerts",
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("limit_name", sa.Text(), nullable=False),
        sa.Column("period", sa.Text(), nullable=False),
        sa.Column("threshold", sa.Integer(), nullable=False),
        sa.Column("cap", sa.BigInteger(), nullable=False),
        sa.Column("used", sa.BigInteger(), nullable=False),
        sa.Column("callback_id", sa.Text()),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.PrimaryKeyConstraint("team_id", "key_id", "limit_name", "period", "threshold", name="budget_alerts_pkey"),
        sa.ForeignKeyConstraint(["team_id"], ["teams.id"], name="budget_alerts_team_id_fkey"),
        sa.ForeignKeyConstraint(
            ["callback_id"], ["callbacks.id"], name="budget_alerts_callback_id_fkey", ondelete="SET NULL"
        ),
    )
    op.create_index("budget_alerts_created_at_idx", "budget_alerts", ["created_at"])


def downgrade() -> None:
    """Go back."""
    op.drop_table("budget_alerts")
    op.drop_column("callbacks", "expires_at")
    op.drop_column("callbacks", "receiver")
    op.drop_column("teams", "webhook_url")
