# The secret that a team has replaced, which works for a while beside the new one.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"


def upgrade() -> None:
    """Go forward."""
    op.add_column("api_keys", sa.Column("previous_digest", sa.LargeBinary))
    op.add_column("api_keys", sa.Column("previous_until", sa.DateTime(timezone=True)))
    op.create_unique_constraint("api_keys_previous_digest_key", "api_keys", ["previous_digest"])


def downgrade() -> None:
    """Go back."""
    op.drop_constraint("api_keys_previous_digest_key", "api_keys")
    for column in ("previous_until", "previous_digest"):
        op.drop_column("api_keys", column)
