# Which endpoints each key may call.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0034"
down_revision = "0033"


def upgrade() -> None:
    """Go forward."""
    op.add_column("api_keys", sa.Column("allowed_endpoints", sa.ARRAY(sa.Text)))


def downgrade() -> None:
    """Go back."""
    op.drop_column("api_keys", "allowed_endpoints")
