# Which key an admin's rotation made in a key's place: the audit log, which knew it, is not read for it.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0048"
down_revision = "0047"

# A rotation wrote the new key and its line of the log in one transaction, at one moment: the log has an index of these.
# It is not read through: it may be long, and gateways look up no key before this ends.
KNOWN = """
    UPDATE api_keys SET replaced_by = last.next
    FROM (
        SELECT DISTINCT ON (log.subject) log.subject, made.id AS next
        FROM api_keys AS made JOIN audit_log AS log ON log.team_id = made.team_id AND log.created_at = made.created_at
        WHERE log.action = 'key.rotated' AND log.details->>'replaced_by' = made.id
        ORDER BY log.subject, log.id DESC
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
