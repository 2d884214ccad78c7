# Hours of all teams together, beside those of each: the hours there are become minutes again, of which the next
# chores make both.

from __future__ import annotations

from alembic import op

revision = "0025"
down_revision = "0024"


def upgrade() -> None:
    """Go forward."""
    op.execute("UPDATE usage_series SET step = 1 WHERE step = 60")


def downgrade() -> None:
    """Go back."""
    op.execute("DELETE FROM usage_series WHERE step IN (2, 61)")
