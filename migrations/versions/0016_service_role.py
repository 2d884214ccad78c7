# The few acts of gateways and workers that go beyond reading and adding rows of the ledger and the audit log. Each is a
# function of the owner, so that a role that owns no table can run them and change nothing else there.

from __future__ import annotations

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

FUNCTIONS = {
    # A day's partition of the ledger.
    "make_usage_partition(of date) RETURNS void LANGUAGE plpgsql": """
        BEGIN
            EXECUTE format(
                'CREATE TABLE %I PARTITION OF usage_records FOR VALUES FROM (%L) TO (%L)',
                'usage_records_' || to_char(of, 'YYYYMMDD'), of, of + 1
            );
        END
    """,
    # Retention: a day's rows, never those of today or yesterday.
    "drop_usage_partition(of date) RETURNS void LANGUAGE plpgsql": """
        BEGIN
            IF of >= current_date - 1 THEN
                RAISE EXCEPTION 'the ledger of % is not past any retention', of;
            END IF;
            EXECUTE format('DROP TABLE IF EXISTS %I', 'usage_records_' || to_char(of, 'YYYYMMDD'));
        END
    """,
    # Retention: rows of days that never had a partition.
    "delete_usage_stragglers(before date, at_most integer) RETURNS bigint LANGUAGE sql": """
        WITH deleted AS (
            DELETE FROM usage_records_rest WHERE (day, request_id) IN (
                SELECT day, request_id FROM usage_records_rest
                WHERE day < least(before, current_date - 1) LIMIT at_most
            ) RETURNING 1
        ) SELECT count(*) FROM deleted
    """,
    # Retention: what safety checks found; what admins did stays.
    "delete_safety_outcomes(keep interval, at_most integer) RETURNS bigint LANGUAGE sql": """
        WITH deleted AS (
            DELETE FROM audit_log WHERE id IN (
                SELECT id FROM audit_log
                WHERE created_at < clock_timestamp() - keep AND starts_with(action, 'safety.')
                ORDER BY created_at LIMIT at_most
            ) RETURNING 1
        ) SELECT count(*) FROM deleted
    """,
}


def upgrade() -> None:
    """Go forward. The path is set so that no table of a caller's own stands for one of these."""
    for declared, body in FUNCTIONS.items():
        head, _, language = declared.partition(" LANGUAGE ")
        runs_as = "SECURITY DEFINER SET search_path = public, pg_temp"
        op.execute(f"CREATE FUNCTION {head} LANGUAGE {language} {runs_as} AS $${body}$$")
        op.execute(f"REVOKE EXECUTE ON FUNCTION {head.partition(' RETURNS')[0]} FROM PUBLIC")


def downgrade() -> None:
    """Go back."""
    for declared in FUNCTIONS:
        op.execute(f"DROP FUNCTION {declared.partition(' RETURNS')[0]}")
