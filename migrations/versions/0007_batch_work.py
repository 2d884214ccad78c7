# What batches cost so far, who checks their input, and items in the order in which workers take them.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

SUMS = ("input_tokens", "output_tokens", "cost_nanousd")


def upgrade() -> None:
    """Go forward."""
    for name in SUMS:
        op.add_column("batches", sa.Column(name, sa.BigInteger, nullable=False, server_default=sa.text("0")))
    op.add_column("batches", sa.Column("tries", sa.Integer, nullable=False, server_default=sa.text("0")))
    op.drop_column("batches", "usage")
    op.create_index("batches_output_file_id_idx", "batches", ["output_file_id"])
    op.create_index("batches_error_file_id_idx", "batches", ["error_file_id"])


def downgrade() -> None:
    """Go back."""
    op.drop_index("batches_error_file_id_idx")
    op.drop_index("batches_output_file_id_idx")
    op.add_column("batches", sa.Column("usage", sa.dialects.postgresql.JSONB))
    op.drop_column("batches", "tries")
    for name in SUMS:
        op.drop_column("batches", name)
