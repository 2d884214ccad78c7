# Responses that run in the background, and the events of their streams.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"


def upgrade() -> None:
    """Go forward."""
    open_now = sa.Column("is_open", sa.Boolean, nullable=False, server_default=sa.text("false"))
    op.add_column("stored_responses", open_now)
    op.create_table(
        "response_events",
        sa.Column("response_id", sa.Text, sa.ForeignKey("stored_responses.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("last_event", sa.BigInteger, primary_key=True),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
    )


def downgrade() -> None:
    """Go back."""
    op.drop_table("response_events")
    op.drop_column("stored_responses", "is_open")
