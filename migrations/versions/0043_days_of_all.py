# Hours of all teams that make days are marked, and days stand beside them (billing.ledger.series): the next chores make
# both of the hours there are. Back, the hours are as any other again.

from __future__ import annotations

from alembic import op

revision = "0043"
down_revision = "0042"


def upgrade() -> None:
    """Go forward."""


def downgrade() -> None:
    """Go back."""
    op.execute("DELETE FROM usage_series WHERE step = 63")
    op.execute("UPDATE usage_series SET step = 61 WHERE step = 62")
