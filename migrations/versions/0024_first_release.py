# The schema of version 1.0.0, the first that was released.

from __future__ import annotations

from alembic import op

from migrations.first_functions import INNER, LEASES, OWNERS_ACTS, PLANS
from migrations.first_tables import FACTS, INDEXES, OPTIONS, TABLES

revision = "0024"
down_revision = None


def upgrade() -> None:
    """Go forward. Where an owner's act runs, no table of a caller's own stands for one of these: its path is set."""
    for name, columns in TABLES.items():
        op.execute(f"CREATE TABLE {name} ({columns}) {OPTIONS.get(name, '')}")
    # Catches the days that have no partition yet; the ledger makes those of the coming days ahead of time.
    op.execute("CREATE TABLE usage_records_rest PARTITION OF usage_records DEFAULT")
    for index in INDEXES:
        op.execute(f"CREATE {index}")
    for name, fact in FACTS.items():
        op.execute(f"ALTER TABLE usage_records ADD CONSTRAINT usage_records_{name}_check CHECK ({fact}) NOT VALID")
    for declared, body in OWNERS_ACTS.items():
        head, _, language = declared.partition(" LANGUAGE ")
        runs_as = "SECURITY DEFINER SET search_path = public, pg_temp"
        op.execute(f"CREATE FUNCTION {head} LANGUAGE {language} {runs_as} AS $${body}$$")
        op.execute(f"REVOKE EXECUTE ON FUNCTION {head.partition(' RETURNS')[0]} FROM PUBLIC")
    for declared, body in LEASES.items():
        head, _, language = declared.partition(" LANGUAGE ")
        conflicts = "#variable_conflict use_column\n" if language == "plpgsql" else ""
        plans = PLANS if language == "plpgsql" and head.partition("(")[0] not in INNER else ""
        op.execute(f"CREATE FUNCTION {head} LANGUAGE {language}{plans} AS $${conflicts}{body}$$")


def downgrade() -> None:
    """Go back to nothing."""
    for declared in (*LEASES, *OWNERS_ACTS):
        op.execute(f"DROP FUNCTION {declared.partition('(')[0].strip()}")
    for name in reversed(TABLES):
        op.drop_table(name)
