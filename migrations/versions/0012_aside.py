# Which batches the house makes itself, such as those of the held-back share: they count in no rate of their team's.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    op.add_column("batches", sa.Column("is_aside", sa.Boolean, nullable=False, server_default=sa.false()))


def downgrade() -> None:
    """Go back."""
    op.drop_column("batches", "is_aside")
