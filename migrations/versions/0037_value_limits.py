# Limits of a team for each of its end users and for values of its tags: scopes "user:TEAM/HASH" and
# "tag:TEAM/KEY=HASH", made by the first call that names one. HASH is keyed (teams.hash_key): no name stands in a scope.
# A row of the ledger names the scopes that its call held, and spends these and no others: such a limit counts from when
# it is set.

from __future__ import annotations

import importlib

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

revision = "0037"
down_revision = "0036"

PLANS = "LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off"
IS_OF_VALUE = "scope ~ '^(user|tag):'"

FUNCTIONS = {
    # The limits of an end user or a value of a tag: its own, or else those of each ("*").
    "limits_of_value(user_limits jsonb, tag_limits jsonb, scope text) RETURNS jsonb": (
        "LANGUAGE sql IMMUTABLE",
        """
        SELECT coalesce(named.limits -> right(scope, 32), named.limits -> '*') -> 'limits'
        FROM (
            SELECT CASE WHEN scope LIKE 'user:%' THEN user_limits
                        ELSE tag_limits -> left(substr(scope, strpos(scope, '/') + 1), -33) END AS limits
        ) AS named
        """,
    ),
    # What a scope may use of a day or a month; null: as much as it likes. The row that says so stays as it is until the
    # end of the transaction.
    "cap_of(scope text, unit text, period text) RETURNS bigint": (
        PLANS,
        """
        DECLARE
            v_limits jsonb;
            v_team text := split_part(substr(scope, strpos(scope, ':') + 1), '/', 1);
        BEGIN
            IF scope LIKE 'team:%' THEN
                SELECT limits INTO v_limits FROM teams WHERE id = v_team FOR SHARE;
            ELSIF scope LIKE 'model:%' THEN
                SELECT model_limits -> substr(scope, 8 + length(v_team)) INTO v_limits
                FROM teams WHERE id = v_team FOR SHARE;
            ELSIF scope ~ '^(user|tag):' THEN
                SELECT limits_of_value(user_limits, tag_limits, scope) INTO v_limits
                FROM teams WHERE id = v_team FOR SHARE;
            ELSE
                SELECT limits INTO v_limits FROM api_keys WHERE id = substr(scope, 5) FOR SHARE;
            END IF;
            RETURN CAST(
                v_limits ->> (unit || CASE length(period) WHEN 7 THEN '_per_month' ELSE '_per_day' END) AS bigint
            );
        END
        """,
    ),
    # Which of these scopes have no balance on a day on which their team has ``most`` of the kind. Transactions at the
    # same time do not see each other's: a few more than ``most`` may be made.
    "scopes_beyond(scopes text[], day text, most bigint) RETURNS SETOF text": (
        PLANS,
        """
        BEGIN
            RETURN QUERY
            WITH new AS MATERIALIZED (
                SELECT DISTINCT said.scope, split_part(said.scope, '/', 1) AS kind FROM unnest(scopes) AS said (scope)
                WHERE NOT EXISTS (
                    SELECT FROM balances AS balance
                    WHERE balance.scope = said.scope AND balance.unit = 'nanousd' AND balance.period = day
                )
            ), made AS MATERIALIZED (
                SELECT named.kind, (
                    SELECT count(*) FROM (
                        SELECT FROM balances
                        WHERE period = day AND unit = 'nanousd' AND scope ~ '^(user|tag):'
                          AND scope >= named.kind || '/' AND scope < named.kind || '0'
                        LIMIT most
                    ) AS counted
                ) AS total
                FROM (SELECT DISTINCT kind FROM new) AS named
            )
            SELECT new.scope FROM new JOIN made ON made.kind = new.kind WHERE made.total >= most;
        END
        """,
    ),
    # Sets the caps of all balances of a team's end users and tags to what its row says, as follow_limits does.
    "follow_value_limits(of_team text, moment timestamptz DEFAULT NULL) RETURNS void": (
        PLANS,
        """
        BEGIN
            PERFORM FROM balances
            WHERE scope >= 'tag:' || of_team || '/' AND scope < 'tag:' || of_team || '0'
               OR scope >= 'user:' || of_team || '/' AND scope < 'user:' || of_team || '0'
            ORDER BY scope, unit, period
            FOR NO KEY UPDATE;
            UPDATE balances AS balance SET cap = own.cap, tight_since = CASE
                WHEN own.cap < greatest(balance.drawn + balance.corrected, 0) THEN coalesce(moment, clock_timestamp())
            END
            FROM (
                SELECT scope, unit, period, CAST(limits_of_value(user_limits, tag_limits, scope) ->> (
                    unit || CASE length(period) WHEN 7 THEN '_per_month' ELSE '_per_day' END
                ) AS bigint) AS cap
                FROM balances JOIN teams ON teams.id = of_team
                WHERE scope >= 'tag:' || of_team || '/' AND scope < 'tag:' || of_team || '0'
                   OR scope >= 'user:' || of_team || '/' AND scope < 'user:' || of_team || '0'
            ) AS own
            WHERE balance.scope = own.scope AND balance.unit = own.unit AND balance.period = own.period;
            PERFORM pg_notify('tollgate_leases', scope) FROM (
                SELECT DISTINCT scope FROM balances
                WHERE (scope >= 'tag:' || of_team || '/' AND scope < 'tag:' || of_team || '0'
                       OR scope >= 'user:' || of_team || '/' AND scope < 'user:' || of_team || '0')
                  AND cap < greatest(drawn + corrected, 0)
            ) AS full_one;
        END
        """,
    ),
}


def upgrade() -> None:
    """Go forward."""
    for name in ("user_limits", "tag_limits"):
        op.add_column("teams", sa.Column(name, JSONB, nullable=False, server_default=sa.text("'{}'::jsonb")))
    op.add_column("teams", sa.Column("calls_without_user", sa.Text, nullable=False, server_default="refuse"))
    key = sa.text("replace((gen_random_uuid())::text, '-'::text, ''::text)")
    op.add_column("teams", sa.Column("hash_key", sa.Text, nullable=False, server_default=key))
    op.add_column("usage_records", sa.Column("held_scopes", ARRAY(sa.Text)))
    where = sa.text(f"unit = 'nanousd' AND {IS_OF_VALUE}")
    op.create_index("balances_period_scope_idx", "balances", ["period", "scope"], postgresql_where=where)
    for head, (how, body) in FUNCTIONS.items():
        conflicts = "#variable_conflict use_column\n" if "plpgsql" in how else ""
        op.execute(f"CREATE OR REPLACE FUNCTION {head} {how} AS $${conflicts}{body}$$")


def downgrade() -> None:
    """Go back: what the limits of end users and tags have drawn goes with them."""
    before = importlib.import_module("migrations.versions.0033_model_limits")
    before._make(*next(each for each in before.FUNCTIONS.items() if each[0].startswith("cap_of(")))
    for head in FUNCTIONS:
        if not head.startswith("cap_of("):
            op.execute(f"DROP FUNCTION {head.partition('(')[0]}")
    op.drop_index("balances_period_scope_idx", "balances")
    for table in ("leases", "balances"):
        op.execute(f"DELETE FROM {table} WHERE {IS_OF_VALUE}")  # noqa: S608  (tables are ours)
    op.drop_column("usage_records", "held_scopes")
    for name in ("hash_key", "calls_without_user", "tag_limits", "user_limits"):
        op.drop_column("teams", name)
