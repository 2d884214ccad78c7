# Hours of engine replicas, and what the calls of each endpoint cost us.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go forward."""
    op.create_table(
        "instances",
        sa.Column("instance_id", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("model", sa.Text()),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("alive_us", sa.BigInteger(), nullable=False),
        sa.Column("busy_us", sa.BigInteger(), nullable=False),
        sa.Column("first_seen", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen", sa.DateTime(timezone=True), nullable=False),
        sa.Column("load", postgresql.JSONB(), nullable=False),
        sa.PrimaryKeyConstraint("instance_id", name="instances_pkey"),
    )
    op.create_index("instances_last_seen_idx", "instances", ["last_seen"], unique=False)
    op.create_table(
        "instance_days",
        sa.Column("instance_id", sa.Text(), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("gpu_hour_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("model", sa.Text()),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("alive_us", sa.BigInteger(), nullable=False),
        sa.Column("busy_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("instance_id", "day", "gpu_hour_nanousd", name="instance_days_pkey"),
    )
    op.create_index("instance_days_day_idx", "instance_days", ["day"], unique=False)
    op.create_table(
        "endpoint_days",
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("gpu_cost_nanousd", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("day", "endpoint", name="endpoint_days_pkey"),
    )
    # The rows that are there already; from now on each row adds itself.
    op.execute(
        "INSERT INTO endpoint_days (day, endpoint, gpu_cost_nanousd) "
        "SELECT day, provider_endpoint, sum(gpu_cost_nanousd) FROM usage_records "
        "WHERE gpu_cost_nanousd > 0 GROUP BY day, provider_endpoint"
    )


def downgrade() -> None:
    """Go back."""
    for table in ("endpoint_days", "instance_days", "instances"):
        op.drop_table(table)
