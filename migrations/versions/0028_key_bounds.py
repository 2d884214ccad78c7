# What each key may ask for, and whence it may call.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"


def upgrade() -> None:
    """Go forward."""
    for column in ("allowed_models", "allowed_addresses"):
        op.add_column("api_keys", sa.Column(column, sa.ARRAY(sa.Text)))


def downgrade() -> None:
    """Go back."""
    for column in ("allowed_addresses", "allowed_models"):
        op.drop_column("api_keys", column)
