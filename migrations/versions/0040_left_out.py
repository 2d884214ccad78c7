# Which models a call's route left out, and why: null for nearly all calls.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0040"
down_revision = "0039"


def upgrade() -> None:
    """Go forward."""
    op.add_column("usage_records", sa.Column("left_out", JSONB))


def downgrade() -> None:
    """Go back."""
    op.drop_column("usage_records", "left_out")
