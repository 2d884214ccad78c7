# Contents of calls, for the teams that want them kept.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0041"
down_revision = "0040"


def upgrade() -> None:
    """Go forward."""
    op.add_column("teams", sa.Column("contents", JSONB))
    op.create_table(
        "call_contents",
        sa.Column("request_id", sa.Uuid, primary_key=True),
        sa.Column("team_id", sa.Text, sa.ForeignKey("teams.id", ondelete="CASCADE"), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
    )
    op.create_index("call_contents_team_id_created_at_idx", "call_contents", ["team_id", "created_at"])


def downgrade() -> None:
    """Go back."""
    op.drop_table("call_contents")
    op.drop_column("teams", "contents")
