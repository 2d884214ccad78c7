# To which cost centre a team's cost goes, as finance names it.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0035"
down_revision = "0034"


def upgrade() -> None:
    """Go forward."""
    op.add_column("teams", sa.Column("cost_centre", sa.Text))


def downgrade() -> None:
    """Go back."""
    op.drop_column("teams", "cost_centre")
