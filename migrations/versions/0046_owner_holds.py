# What the running calls of each process hold, as it tells with its beat: the rest of what it has drawn is free.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0046"
down_revision = "0045"


def upgrade() -> None:
    """Go forward."""
    op.add_column("owners", sa.Column("holds", JSONB))


def downgrade() -> None:
    """Go back."""
    op.drop_column("owners", "holds")
