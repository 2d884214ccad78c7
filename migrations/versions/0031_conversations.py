# Conversations, and the items that they hold.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"


def upgrade() -> None:
    """Go forward."""
    op.create_table(
        "conversations",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("team_id", sa.Text, sa.ForeignKey("teams.id", ondelete="CASCADE"), nullable=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.Column("items", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("bytes", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("last_position", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("touched_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
    )
    op.create_index("conversations_team_id_touched_at_idx", "conversations", ["team_id", "touched_at"])
    op.create_index("conversations_touched_at_idx", "conversations", ["touched_at"])
    parent = sa.ForeignKey("conversations.id", ondelete="CASCADE")
    op.create_table(
        "conversation_items",
        sa.Column("conversation_id", sa.Text, parent, primary_key=True),
        sa.Column("position", sa.BigInteger, primary_key=True),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
    )
    op.create_index("conversation_items_id_idx", "conversation_items", ["conversation_id", "id"], unique=True)


def downgrade() -> None:
    """Go back."""
    op.drop_table("conversation_items")
    op.drop_table("conversations")
