# When a team was deleted: its row stays, for the books speak of it.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0044"
down_revision = "0043"


def upgrade() -> None:
    """Go forward."""
    op.add_column("teams", sa.Column("deleted_at", sa.DateTime(timezone=True)))


def downgrade() -> None:
    """Go back."""
    op.drop_column("teams", "deleted_at")
