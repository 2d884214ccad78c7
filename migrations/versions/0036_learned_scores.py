# Compared calls keep the numbers of their form, and a team's own scores on a route are learned from them.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0036"
down_revision = "0035"


def upgrade() -> None:
    """Go forward."""
    op.add_column("held_back", sa.Column("form", sa.LargeBinary))
    op.add_column("recalibrations", sa.Column("learned", sa.LargeBinary))


def downgrade() -> None:
    """Go back."""
    op.drop_column("recalibrations", "learned")
    op.drop_column("held_back", "form")
