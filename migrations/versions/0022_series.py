# Calls added up by the minute, as charts read them; those that are in the ledger already by the hour.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

KEY = ("team_id", "key_id", "model_used", "provider", "status", "tier", "route_reason")
SUMS = (
    *("input_tokens", "cached_input_tokens", "cache_write_tokens", "output_tokens", "reasoning_tokens"),
    *("cost_nanousd", "gpu_cost_nanousd", "saved_nanousd"),
)
BUCKET = "(CAST(least(floor(10 * ln(greatest({0}, 1))), 255) AS bigint) << 40) + 1"
MS = "CAST(CAST('x' || left(replace(CAST(request_id AS text), '-', ''), 12) AS bit(48)) AS bigint)"
BOOKED = f"""
    INSERT INTO usage_series (at, step, {", ".join(KEY)}, calls, cached, {", ".join(SUMS)}, first_token, total)
    SELECT to_timestamp({MS} / 3600000 * 3600), 60, {", ".join(KEY)}, count(*),
           count(*) FILTER (WHERE attempts -> -1 ->> 'outcome' = 'cached'),
           {", ".join(f"sum({name})" for name in SUMS)},
           array_agg({BUCKET.format("first_token_ms")}) FILTER (WHERE first_token_ms IS NOT NULL),
           array_agg({BUCKET.format("total_ms")})
    FROM usage_records GROUP BY 1, {", ".join(KEY)}
"""  # noqa: S608  (the words are ours)


def upgrade() -> None:
    """Go forward."""
    op.create_table(
        "usage_series",
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("step", sa.SmallInteger, nullable=False),
        *[sa.Column(name, sa.Text, nullable=False) for name in KEY],
        sa.Column("code", sa.Text, nullable=False, server_default=""),
        *[
            sa.Column(name, sa.BigInteger, nullable=False, server_default=sa.text("0"))
            for name in ("calls", "cached", *SUMS)
        ],
        sa.Column("first_token", ARRAY(sa.BigInteger)),
        sa.Column("total", ARRAY(sa.BigInteger)),
    )
    op.execute(BOOKED)
    op.create_index("usage_series_step_at_idx", "usage_series", ["step", "at"])
    op.create_index("usage_series_team_id_at_idx", "usage_series", ["team_id", "at"])


def downgrade() -> None:
    """Go back."""
    op.drop_table("usage_series")
