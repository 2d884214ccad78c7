# Responses that were stored.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    op.create_table(
        "stored_responses",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("team_id", sa.Text, sa.ForeignKey("teams.id", ondelete="CASCADE"), nullable=False),
        sa.Column("previous_id", sa.Text),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.Column("conversation_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
    )
    op.create_index("stored_responses_team_id_created_at_idx", "stored_responses", ["team_id", "created_at"])
    op.create_index("stored_responses_created_at_idx", "stored_responses", ["created_at"])


def downgrade() -> None:
    """Go back."""
    op.drop_table("stored_responses")
