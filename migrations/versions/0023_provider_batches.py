# Lines of batches that go through the Batch APIs of their providers, and what that took off their price.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

NOW = sa.text("now()")


def upgrade() -> None:
    """Go forward."""
    for table in ("usage_records", "usage_daily", "usage_series"):
        op.add_column(table, sa.Column("discount_nanousd", sa.BigInteger, nullable=False, server_default="0"))
    op.create_table(
        "provider_batches",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("batch_id", sa.Text, sa.ForeignKey("batches.id", ondelete="CASCADE"), nullable=False),
        sa.Column("provider", sa.Text, nullable=False),
        sa.Column("place", sa.Text, nullable=False),
        sa.Column("target", JSONB, nullable=False),
        sa.Column("key_digest", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("lines", sa.Integer, nullable=False, server_default="0"),
        sa.Column("bytes", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("upstream_id", sa.Text),
        sa.Column("tries", sa.SmallInteger, nullable=False, server_default="0"),
        sa.Column("outcome", sa.Text),
        sa.Column("lease_owner", sa.Text),
        sa.Column("lease_until", sa.DateTime(timezone=True)),
        sa.Column("next_look_at", sa.DateTime(timezone=True), nullable=False, server_default=NOW),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=NOW),
        sa.Column("touched_at", sa.DateTime(timezone=True), nullable=False, server_default=NOW),
        sa.Column("tried_at", sa.DateTime(timezone=True)),
        sa.Column("submitted_at", sa.DateTime(timezone=True)),
        sa.Column("cancelled_at", sa.DateTime(timezone=True)),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
    )
    op.create_index("provider_batches_batch_id_idx", "provider_batches", ["batch_id"])
    op.create_index(
        "provider_batches_open_idx",
        "provider_batches",
        ["next_look_at"],
        postgresql_where=sa.text("status <> 'ended'"),
    )
    op.add_column("batch_items", sa.Column("provider_batch_id", sa.Text))
    op.add_column("batch_items", sa.Column("provider_line", sa.LargeBinary))
    op.add_column("batch_items", sa.Column("sent", JSONB))
    op.add_column("batch_items", sa.Column("is_live_only", sa.Boolean, nullable=False, server_default=sa.false()))
    op.create_index(
        "batch_items_provider_batch_id_idx",
        "batch_items",
        ["provider_batch_id", "position"],
        postgresql_where=sa.text("provider_batch_id IS NOT NULL"),
    )


def downgrade() -> None:
    """Go back. Lines that lie with a provider are asked again, as ordinary calls."""
    op.execute(
        "UPDATE batch_items SET status = 'queued', lease_owner = NULL, lease_until = NULL "
        "WHERE status = 'running' AND provider_batch_id IS NOT NULL"
    )
    op.drop_index("batch_items_provider_batch_id_idx", "batch_items")
    for column in ("is_live_only", "sent", "provider_line", "provider_batch_id"):
        op.drop_column("batch_items", column)
    op.drop_table("provider_batches")
    for table in ("usage_series", "usage_daily", "usage_records"):
        op.drop_column(table, "discount_nanousd")
