# Which pepper a key is stored under, so that people can tell when the one before is not needed any more.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    op.add_column("api_keys", sa.Column("pepper", sa.Text))


def downgrade() -> None:
    """Go back."""
    op.drop_column("api_keys", "pepper")
