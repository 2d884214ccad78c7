# Which key an admin's rotation made in a key's place: the audit log, which knew it, is not read for it.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0048"
down_revision = "0047"

KNOWN = """
    UPDATE api_keys SET replaced_by = last.details->>'replaced_by'
    FROM (
        SELECT DISTINCT ON (subject) subject, details FROM audit_log WHERE action = 'key.rotated'
        ORDER BY subject, id DESC
    ) AS last
    WHERE api_keys.id = last.subject
"""


def upgrade() -> None:
    """Go forward."""
    op.add_column("api_keys", sa.Column("replaced_by", sa.Text))
    op.execute(KNOWN)


def downgrade() -> None:
    """Go back."""
    op.drop_column("api_keys", "replaced_by")
