# When each key was last used.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    op.add_column("api_keys", sa.Column("last_used_at", sa.DateTime(timezone=True)))


def downgrade() -> None:
    """Go back."""
    op.drop_column("api_keys", "last_used_at")
