# Keys of providers that teams bring, and what a team chooses about them.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0038"
down_revision = "0037"


def upgrade() -> None:
    """Go forward."""
    op.add_column("teams", sa.Column("company_keys", sa.Text, nullable=False, server_default="otherwise"))
    op.add_column("teams", sa.Column("own_key_cost", sa.Text, nullable=False, server_default="none"))
    op.create_table(
        "provider_keys",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("team_id", sa.Text, sa.ForeignKey("teams.id"), nullable=False),
        sa.Column("provider", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("secret", sa.LargeBinary, nullable=False),
        sa.Column("fingerprint", sa.Text, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.Column("rotated_at", sa.DateTime(timezone=True)),
    )
    op.create_index("provider_keys_team_id_idx", "provider_keys", ["team_id"])


def downgrade() -> None:
    """Go back."""
    op.drop_table("provider_keys")
    op.drop_column("teams", "own_key_cost")
    op.drop_column("teams", "company_keys")
