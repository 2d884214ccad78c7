# Every table of the first release: the money's, the teams', the batches'.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# In the order in which they can be dropped.
TABLES = [
    "callbacks",
    "batch_items",
    "file_chunks",
    "batches",
    "webhook_secrets",
    "idempotency",
    "files",
    "api_keys",
    "teams",
    "usage_records",
    "usage_daily",
    "flushers",
    "closed_days",
    "audit_log",
]


def upgrade() -> None:
    """Go forward."""
    op.create_table(
        "audit_log",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("team_id", sa.Text()),
        sa.Column("subject", sa.Text()),
        sa.Column("request_id", sa.Text()),
        sa.Column("details", postgresql.JSONB()),
        sa.PrimaryKeyConstraint("id", name="audit_log_pkey"),
    )
    op.create_index("audit_log_created_at_idx", "audit_log", ["created_at"], unique=False)
    op.create_index("audit_log_team_id_created_at_idx", "audit_log", ["team_id", "created_at"], unique=False)
    op.create_table(
        "closed_days",
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("closed_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("day", name="closed_days_pkey"),
    )
    op.create_table(
        "flushers",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("watermark", sa.DateTime(timezone=True), nullable=False),
        sa.Column("backlog", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="flushers_pkey"),
    )
    op.create_table(
        "teams",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("weight", sa.Double(), server_default=sa.text("1"), nullable=False),
        sa.Column("allowed_models", postgresql.ARRAY(sa.Text())),
        sa.Column("allow_smaller", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("safety", postgresql.JSONB()),
        sa.Column("limits", postgresql.JSONB(), server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.Column("suspended_at", sa.DateTime(timezone=True)),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name="teams_pkey"),
    )
    op.create_table(
        "usage_daily",
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("booked_on", sa.Date(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("model_used", sa.Text(), nullable=False),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("calls", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("cached_input_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("cache_write_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("reasoning_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("cost_nanousd", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("gpu_cost_nanousd", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint(
            "team_id", "day", "booked_on", "key_id", "model_used", "tier", "status", name="usage_daily_pkey"
        ),
    )
    op.create_index("usage_daily_day_idx", "usage_daily", ["day"], unique=False)
    op.create_table(
        "usage_records",
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("request_id", sa.Uuid(), nullable=False),
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("model_asked", sa.Text(), nullable=False),
        sa.Column("model_used", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("provider_endpoint", sa.Text(), nullable=False),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.Column("priority", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("input_tokens", sa.Integer(), nullable=False),
        sa.Column("cached_input_tokens", sa.Integer(), nullable=False),
        sa.Column("cache_write_tokens", sa.Integer(), nullable=False),
        sa.Column("output_tokens", sa.Integer(), nullable=False),
        sa.Column("reasoning_tokens", sa.Integer(), nullable=False),
        sa.Column("cost_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("gpu_cost_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("queue_ms", sa.Double()),
        sa.Column("first_token_ms", sa.Double()),
        sa.Column("prefill_ms", sa.Double()),
        sa.Column("decode_ms", sa.Double()),
        sa.Column("total_ms", sa.Double(), nullable=False),
        sa.Column("route_reason", sa.Text(), nullable=False),
        sa.Column("complexity", sa.Double()),
        sa.Column("attempts", postgresql.JSONB(), nullable=False),
        sa.Column("client_request_id", sa.Text()),
        sa.Column("user_tag", sa.Text()),
        sa.Column("metadata", postgresql.JSONB()),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("booked_on", sa.Date()),
        sa.PrimaryKeyConstraint("day", "request_id", name="usage_records_pkey"),
        postgresql_partition_by="RANGE (day)",
    )
    op.create_index("usage_records_team_id_created_at_idx", "usage_records", ["team_id", "created_at"], unique=False)
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.Column("limits", postgresql.JSONB(), server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.Column("revoked_at", sa.DateTime(timezone=True)),
        sa.ForeignKeyConstraint(["team_id"], ["teams.id"], name="api_keys_team_id_fkey"),
        sa.PrimaryKeyConstraint("id", name="api_keys_pkey"),
        sa.UniqueConstraint("digest", name="api_keys_digest_key"),
    )
    op.create_index("api_keys_team_id_idx", "api_keys", ["team_id"], unique=False)
    op.create_table(
        "files",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.ForeignKeyConstraint(["team_id"], ["teams.id"], name="files_team_id_fkey"),
        sa.PrimaryKeyConstraint("id", name="files_pkey"),
    )
    op.create_index("files_expires_at_idx", "files", ["expires_at"], unique=False)
    op.create_index("files_team_id_created_at_idx", "files", ["team_id", "created_at"], unique=False)
    op.create_table(
        "idempotency",
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("body_digest", sa.LargeBinary(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("lease_until", sa.DateTime(timezone=True)),
        sa.Column("status", sa.Integer()),
        sa.Column("headers", postgresql.JSONB()),
        sa.Column("answer", sa.LargeBinary()),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["team_id"], ["teams.id"], name="idempotency_team_id_fkey", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("team_id", "endpoint", "key", name="idempotency_pkey"),
    )
    op.create_index("idempotency_expires_at_idx", "idempotency", ["expires_at"], unique=False)
    op.create_table(
        "webhook_secrets",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("secret", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["team_id"], ["teams.id"], name="webhook_secrets_team_id_fkey"),
        sa.PrimaryKeyConstraint("id", name="webhook_secrets_pkey"),
    )
    op.create_index("webhook_secrets_team_id_idx", "webhook_secrets", ["team_id"], unique=False)
    op.create_table(
        "batches",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("model", sa.Text()),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("priority", sa.Text(), server_default=sa.text("'normal'"), nullable=False),
        sa.Column("completion_window", sa.Text(), server_default=sa.text("'24h'"), nullable=False),
        sa.Column("callback_url", sa.Text()),
        sa.Column("input_file_id", sa.Text()),
        sa.Column("output_file_id", sa.Text()),
        sa.Column("error_file_id", sa.Text()),
        sa.Column("errors", postgresql.JSONB()),
        sa.Column("metadata", postgresql.JSONB()),
        sa.Column("total", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("completed", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("failed", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("usage", postgresql.JSONB()),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("estimated_completion", sa.DateTime(timezone=True)),
        sa.Column("in_progress_at", sa.DateTime(timezone=True)),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.Column("finalizing_at", sa.DateTime(timezone=True)),
        sa.Column("completed_at", sa.DateTime(timezone=True)),
        sa.Column("failed_at", sa.DateTime(timezone=True)),
        sa.Column("expired_at", sa.DateTime(timezone=True)),
        sa.Column("cancelling_at", sa.DateTime(timezone=True)),
        sa.Column("cancelled_at", sa.DateTime(timezone=True)),
        sa.ForeignKeyConstraint(
            ["error_file_id"], ["files.id"], name="batches_error_file_id_fkey", ondelete="SET NULL"
        ),
        sa.ForeignKeyConstraint(
            ["input_file_id"], ["files.id"], name="batches_input_file_id_fkey", ondelete="SET NULL"
        ),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name="batches_key_id_fkey"),
        sa.ForeignKeyConstraint(
            ["output_file_id"], ["files.id"], name="batches_output_file_id_fkey", ondelete="SET NULL"
        ),
        sa.ForeignKeyConstraint(["team_id"], ["teams.id"], name="batches_team_id_fkey"),
        sa.PrimaryKeyConstraint("id", name="batches_pkey"),
    )
    op.create_index(
        "batches_open_idx",
        "batches",
        ["expires_at"],
        unique=False,
        postgresql_where=sa.text("status IN ('validating', 'in_progress', 'finalizing', 'cancelling')"),
    )
    op.create_index("batches_team_id_created_at_idx", "batches", ["team_id", "created_at"], unique=False)
    op.create_table(
        "file_chunks",
        sa.Column("file_id", sa.Text(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["file_id"], ["files.id"], name="file_chunks_file_id_fkey", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("file_id", "position", name="file_chunks_pkey"),
    )
    op.create_table(
        "batch_items",
        sa.Column("batch_id", sa.Text(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("custom_id", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("lease_owner", sa.Text()),
        sa.Column("lease_until", sa.DateTime(timezone=True)),
        sa.Column("tries", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("not_before", sa.DateTime(timezone=True)),
        sa.Column("request_id", sa.Uuid()),
        sa.Column("response", sa.LargeBinary()),
        sa.Column("error", sa.LargeBinary()),
        sa.Column("finished_at", sa.DateTime(timezone=True)),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name="batch_items_batch_id_fkey", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("batch_id", "position", name="batch_items_pkey"),
    )
    op.create_index(
        "batch_items_open_idx",
        "batch_items",
        ["batch_id", "position"],
        unique=False,
        postgresql_where=sa.text("status IN ('queued', 'running')"),
    )
    op.create_table(
        "callbacks",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("batch_id", sa.Text()),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("tries", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("next_try_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("lease_owner", sa.Text()),
        sa.Column("lease_until", sa.DateTime(timezone=True)),
        sa.Column("last_status", sa.Integer()),
        sa.Column("last_error", sa.Text()),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("delivered_at", sa.DateTime(timezone=True)),
        sa.Column("given_up_at", sa.DateTime(timezone=True)),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name="callbacks_batch_id_fkey", ondelete="SET NULL"),
        sa.ForeignKeyConstraint(["team_id"], ["teams.id"], name="callbacks_team_id_fkey"),
        sa.PrimaryKeyConstraint("id", name="callbacks_pkey"),
    )
    op.create_index(
        "callbacks_due_idx",
        "callbacks",
        ["next_try_at"],
        unique=False,
        postgresql_where=sa.text("delivered_at IS NULL AND given_up_at IS NULL"),
    )
    op.create_index("callbacks_team_id_idx", "callbacks", ["team_id"], unique=False)
    # Catches the days that have no partition yet; the ledger makes those of the coming days ahead of time.
    op.execute("CREATE TABLE usage_records_rest PARTITION OF usage_records DEFAULT")


def downgrade() -> None:
    """Go back."""
    for table in TABLES:
        op.drop_table(table)
