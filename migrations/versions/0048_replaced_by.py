# Which key an admin's rotation made in a key's place: the audit log, which knew it, is not read for it.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0048"
down_revision = "0047"

KNOWN = """
    SELECT DISTINCT ON (subject) subject, details->>'replaced_by' AS next FROM audit_log WHERE action = 'key.rotated'
    ORDER BY subject, id DESC
"""
KEEP = """
    UPDATE api_keys SET replaced_by = next
    FROM unnest(CAST(:keys AS text[]), CAST(:others AS text[])) AS known (key, next) WHERE id = key
"""


def upgrade() -> None:
    """Go forward."""
    # A long log takes its time, and from the new column on no gateway can look up a key.
    known = op.get_bind().execute(sa.text(KNOWN)).all()
    op.add_column("api_keys", sa.Column("replaced_by", sa.Text))
    keys, others = [row.subject for row in known], [row.next for row in known]
    op.get_bind().execute(sa.text(KEEP), {"keys": keys, "others": others})


def downgrade() -> None:
    """Go back."""
    op.drop_column("api_keys", "replaced_by")
