# Limits of a team for one model: a scope of their own ("model:TEAM/MODEL") beside those of teams and keys. A team that
# sets none has no such balances and leases. The first limit of a model begins with what its calls have used since the
# month before: that is a lease of no owner, spent to the last, as at the beginning of all leases.

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from migrations.first_functions import LEASES

revision = "0033"
down_revision = "0032"

FUNCTIONS = {
    # What a team, a key or a team at one model may use of a day or a month; null: as much as it likes. The row that
    # says so stays as it is until the end of the transaction.
    "cap_of(scope text, unit text, period text) RETURNS bigint": """
        DECLARE
            v_limits jsonb;
            v_team text;
        BEGIN
            IF scope LIKE 'team:%' THEN
                SELECT limits INTO v_limits FROM teams WHERE id = substr(scope, 6) FOR SHARE;
            ELSIF scope LIKE 'model:%' THEN
                v_team := split_part(substr(scope, 7), '/', 1);
                SELECT model_limits -> substr(scope, 8 + length(v_team)) INTO v_limits
                FROM teams WHERE id = v_team FOR SHARE;
            ELSE
                SELECT limits INTO v_limits FROM api_keys WHERE id = substr(scope, 5) FOR SHARE;
            END IF;
            RETURN CAST(
                v_limits ->> (unit || CASE length(period) WHEN 7 THEN '_per_month' ELSE '_per_day' END) AS bigint
            );
        END
    """,
    # The scopes of models for which these teams have ever set limits, as it is now, whatever the statement saw before:
    # a writer of rows asks once it has the lock of the closed days, which begin_model_limits holds alone.
    "limited_models(of_teams text[]) RETURNS SETOF text": """
        BEGIN
            RETURN QUERY
            SELECT 'model:' || team.id || '/' || model.name
            FROM teams AS team, jsonb_object_keys(team.model_limits) AS model (name)
            WHERE team.id = ANY (of_teams) AND team.model_limits <> '{}';
        END
    """,
    # Begins the leases and balances of a team's limits for models that it has just named, in the transaction that
    # names them: with all that the ledger knows. Since before the team's row was locked, that transaction holds the
    # lock of the closed days alone (hold_ledger): no row is on its way.
    "begin_model_limits(of_team text, models text[], moment timestamptz DEFAULT NULL) RETURNS void": """
        DECLARE
            v_scopes text[];
            v_units text[];
            v_days text[];
            v_amounts bigint[];
            v_first date := date_trunc('month', coalesce(moment, clock_timestamp()) AT TIME ZONE 'UTC')
                            - interval '1 month';
        BEGIN
            WITH used AS (
                SELECT 'model:' || of_team || '/' || model_used AS scope, unit.name AS unit, day,
                       CAST(sum(unit.amount) AS bigint) AS amount
                FROM usage_daily,
                     LATERAL (VALUES ('tokens', input_tokens + output_tokens), ('nanousd', cost_nanousd))
                         AS unit (name, amount)
                WHERE team_id = of_team AND model_used = ANY (models)
                  AND status IN ('answered', 'interrupted', 'blocked')
                  AND day >= v_first
                GROUP BY model_used, unit.name, day
                HAVING sum(unit.amount) > 0
            ), begun AS (
                INSERT INTO leases (owner, scope, unit, day, granted, spent)
                SELECT '', scope, unit, day, amount, amount FROM used
                ORDER BY scope COLLATE "C", unit COLLATE "C", day
                RETURNING scope, unit, to_char(day, 'YYYY-MM-DD') AS day, granted AS amount
            )
            SELECT array_agg(scope), array_agg(unit), array_agg(day), array_agg(amount)
            INTO v_scopes, v_units, v_days, v_amounts FROM begun;
            IF v_scopes IS NOT NULL THEN
                PERFORM make_balances(v_scopes, v_units, v_days);
                PERFORM draw(v_scopes, v_units, v_days, v_amounts);
            END IF;
            SELECT array_agg('model:' || of_team || '/' || model_used), array_agg(unit.name),
                   array_agg(to_char(day, 'YYYY-MM-DD')), array_agg(unit.amount)
            INTO v_scopes, v_units, v_days, v_amounts
            FROM corrections,
                 LATERAL (VALUES ('tokens', input_tokens + output_tokens), ('nanousd', cost_nanousd))
                     AS unit (name, amount)
            WHERE team_id = of_team AND model_used = ANY (models) AND day >= v_first;
            IF v_scopes IS NOT NULL THEN
                PERFORM make_balances(v_scopes, v_units, v_days);
                UPDATE balances AS balance SET corrected = balance.corrected + entry.amount
                FROM (
                    SELECT room.scope, room.unit, part.period, sum(room.amount) AS amount
                    FROM unnest(v_scopes, v_units, v_days, v_amounts) AS room (scope, unit, day, amount),
                         LATERAL (VALUES (room.day), (left(room.day, 7))) AS part (period)
                    GROUP BY room.scope, room.unit, part.period
                ) AS entry
                WHERE balance.scope = entry.scope AND balance.unit = entry.unit AND balance.period = entry.period;
            END IF;
        END
    """,
    # Keeps all writers of rows out until the end of the transaction, once those that are at it have ended.
    "hold_ledger() RETURNS void": """
        BEGIN
            PERFORM pg_advisory_xact_lock(hashtext('closed_days'));
        END
    """,
}


def upgrade() -> None:
    """Go forward."""
    op.add_column("teams", sa.Column("model_limits", JSONB, nullable=False, server_default=sa.text("'{}'::jsonb")))
    op.add_column("usage_records", sa.Column("held_models", ARRAY(sa.Text)))
    for head, body in FUNCTIONS.items():
        _make(head, body)


def downgrade() -> None:
    """Go back: what the limits for models have drawn goes with them."""
    of_cap = next(head for head in LEASES if head.startswith("cap_of("))
    _make(of_cap.partition(" LANGUAGE ")[0], LEASES[of_cap])
    for head in FUNCTIONS:
        if not head.startswith("cap_of("):
            op.execute(f"DROP FUNCTION {head.partition('(')[0]}")
    for table in ("leases", "balances"):
        op.execute(f"DELETE FROM {table} WHERE scope LIKE 'model:%'")  # noqa: S608  (tables are ours)
    op.drop_column("usage_records", "held_models")
    op.drop_column("teams", "model_limits")


def _make(head: str, body: str) -> None:
    """Make or replace a function, planned as those of all leases."""
    plans = "SET plan_cache_mode = force_generic_plan SET enable_seqscan = off"
    op.execute(
        f"CREATE OR REPLACE FUNCTION {head} LANGUAGE plpgsql {plans} AS $$#variable_conflict use_column\n{body}$$"
    )
