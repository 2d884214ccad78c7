# Sessions of people who have signed in, beside the keys of admins.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"


def upgrade() -> None:
    """Go forward."""
    op.add_column("admin_keys", sa.Column("person", sa.Text))


def downgrade() -> None:
    """Go back."""
    op.execute("DELETE FROM admin_keys WHERE person IS NOT NULL")  # what signs in again
    op.drop_column("admin_keys", "person")
