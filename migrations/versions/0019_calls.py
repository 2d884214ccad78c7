# Calls as their teams look at them: rows by team and request id, which is in the order of time, and refused calls.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward. One index takes the place of another: a row costs what it did."""
    op.create_index("usage_records_team_id_request_id_idx", "usage_records", ["team_id", "request_id"])
    op.drop_index("usage_records_team_id_created_at_idx", "usage_records")
    op.create_table(
        "refused_calls",
        sa.Column("request_id", sa.Uuid, primary_key=True),
        sa.Column("team_id", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("endpoint", sa.Text, nullable=False),
        sa.Column("model_asked", sa.Text),
        sa.Column("http_status", sa.Integer, nullable=False),
        sa.Column("code", sa.Text, nullable=False),
        sa.Column("param", sa.Text),
        sa.Column("limit_name", sa.Text),
        sa.Column("message", sa.Text),
    )
    op.create_index("refused_calls_team_id_request_id_idx", "refused_calls", ["team_id", "request_id"])


def downgrade() -> None:
    """Go back."""
    op.drop_table("refused_calls")
    op.create_index("usage_records_team_id_created_at_idx", "usage_records", ["team_id", "created_at"])
    op.drop_index("usage_records_team_id_request_id_idx", "usage_records")
