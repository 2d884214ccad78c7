# What a call was priced by beside its tokens.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    op.add_column("usage_records", sa.Column("units", JSONB))


def downgrade() -> None:
    """Go back."""
    op.drop_column("usage_records", "units")
