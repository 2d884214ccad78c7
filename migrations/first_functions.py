# The functions of version 1.0.0, as its migration makes them: the few acts of gateways and workers that go beyond
# reading and adding rows of the ledger and the audit log, and budgets as rows.
#
# What each scope may use of a day or a month, what is drawn of it, and the leases that the processes have drawn: the
# functions are the only writers of balances and leases; each takes its locks in one order: a share of the owner's row
# (its end waits for that), leases by key, balances by key. The owner's beat is counted last, and only where no other
# statement of the same owner is about to commit: a flush must not wait for an ask that waits for a balance that all
# owners want.
#
# That balance is locked until its statement has committed, so a commit that waits for the disk lets through no more
# than some hundred a second. What may be forgotten does not wait (``commit_soon``).

from __future__ import annotations

# Each is a function of the owner, so that a role that owns no table can run them and change nothing else there.
OWNERS_ACTS = {
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

# Planned once in a connection, by the keys: to plan fifteen statements anew took most of a call's time, and a plan made
# while the tables were small would read them whole for ever.
PLANS = " SET plan_cache_mode = force_generic_plan SET enable_seqscan = off"
# Those that the others alone call, and that so plan as they do: to set it again would take half of their time.
INNER = ("make_balances", "draw", "count_beat", "commit_soon", "sums_of")

LEASES = {
    # What a team or key may use of a day or a month; null: as much as it likes. The row that says so stays as it is
    # until the end of the transaction, so that a limit set meanwhile finds the balance that is made of it.
    "cap_of(scope text, unit text, period text) RETURNS bigint LANGUAGE plpgsql": """
        DECLARE
            v_limits jsonb;
        BEGIN
            IF scope LIKE 'team:%' THEN
                SELECT limits INTO v_limits FROM teams WHERE id = substr(scope, 6) FOR SHARE;
            ELSE
                SELECT limits INTO v_limits FROM api_keys WHERE id = substr(scope, 5) FOR SHARE;
            END IF;
            RETURN CAST(
                v_limits ->> (unit || CASE length(period) WHEN 7 THEN '_per_month' ELSE '_per_day' END) AS bigint
            );
        END
    """,
    # What a balance has left: a correction that leaves less than nothing used gives no room beyond the cap.
    "left_of(balance balances) RETURNS bigint LANGUAGE sql IMMUTABLE": """
        SELECT balance.cap - greatest(balance.drawn + balance.corrected, 0)
    """,
    # Makes the balances that are missing for these rooms of a day: of the day, and of its month for money.
    "make_balances(scopes text[], units text[], days text[]) RETURNS void LANGUAGE plpgsql": """
        BEGIN
            INSERT INTO balances (scope, unit, period, cap)
            SELECT wanted.scope, wanted.unit, wanted.period, cap_of(wanted.scope, wanted.unit, wanted.period)
            FROM (
                SELECT DISTINCT room.scope, room.unit, part.period
                FROM unnest(scopes, units, days) AS room (scope, unit, day),
                     LATERAL (VALUES (room.day), (left(room.day, 7))) AS part (period)
                WHERE room.unit = 'nanousd' OR part.period = room.day
            ) AS wanted
            WHERE NOT EXISTS (
                SELECT FROM balances AS balance
                WHERE balance.scope = wanted.scope AND balance.unit = wanted.unit AND balance.period = wanted.period
            )
            ORDER BY wanted.scope COLLATE "C", wanted.unit COLLATE "C", wanted.period COLLATE "C"
            ON CONFLICT DO NOTHING;
        END
    """,
    # Adds to what is drawn of the balances behind these rooms; ``amounts`` are signed.
    "draw(scopes text[], units text[], days text[], amounts bigint[]) RETURNS void LANGUAGE plpgsql": """
        BEGIN
            PERFORM FROM balances AS balance
            WHERE balance.scope = ANY (scopes) AND (balance.scope, balance.unit, balance.period) IN (
                SELECT room.scope, room.unit, part.period
                FROM unnest(scopes, units, days) AS room (scope, unit, day),
                     LATERAL (VALUES (room.day), (left(room.day, 7))) AS part (period)
            )
            ORDER BY balance.scope, balance.unit, balance.period
            FOR NO KEY UPDATE;
            UPDATE balances AS balance
            SET drawn = balance.drawn + change.amount
            FROM (
                SELECT room.scope, room.unit, part.period, sum(room.amount) AS amount
                FROM unnest(scopes, units, days, amounts) AS room (scope, unit, day, amount),
                     LATERAL (VALUES (room.day), (left(room.day, 7))) AS part (period)
                GROUP BY room.scope, room.unit, part.period
            ) AS change
            WHERE balance.scope = ANY (scopes) AND balance.scope = change.scope
              AND balance.unit = change.unit AND balance.period = change.period
              AND change.amount <> 0;
        END
    """,
    # Counts a statement of an owner that has not ended; returns its beat, or 0 where another one is being counted.
    "count_beat(owner text, moment timestamptz) RETURNS bigint LANGUAGE plpgsql": """
        DECLARE
            v_beat bigint;
        BEGIN
            UPDATE owners SET beat = owners.beat + 1, seen_at = coalesce(moment, seen_at)
            WHERE owners.id = (
                SELECT same.id FROM owners AS same WHERE same.id = owner AND same.ended_at IS NULL
                FOR NO KEY UPDATE SKIP LOCKED
            )
            RETURNING owners.beat INTO v_beat;
            RETURN coalesce(v_beat, 0);
        END
    """,
    # Lets the transaction commit without waiting for the disk: of returns, which are said again where they are lost,
    # and of grants that are not told to anybody before the disk has them (billing/quotas/lease_store.py).
    "commit_soon() RETURNS void LANGUAGE plpgsql": """
        BEGIN
            PERFORM set_config('synchronous_commit', 'off', true);
        END
    """,
    # What rows have spent of a balance, and what lies unused in leases of owners that answer, but for one of them. Both
    # by leases; on its own, for a plan that a session does not need is not made.
    "sums_of(balance balances, asker text, moment timestamptz) RETURNS bigint[] LANGUAGE plpgsql": """
        DECLARE
            v_first date := CAST(rpad(balance.period, 10, '-01') AS date);
            v_sums bigint[];
        BEGIN
            SELECT ARRAY[coalesce(sum(lease.spent), 0), coalesce(
                sum(lease.granted - lease.returned - lease.spent) FILTER (
                    WHERE lease.owner <> asker AND holder.ended_at IS NULL AND holder.seen_at > moment - interval '5 s'
                ), 0
            )]
            INTO v_sums
            FROM leases AS lease LEFT JOIN owners AS holder ON holder.id = lease.owner
            WHERE lease.scope = balance.scope AND lease.unit = balance.unit AND lease.day >= v_first
              AND lease.day < v_first + CASE length(balance.period)
                  WHEN 7 THEN interval '1 month' ELSE interval '1 day' END;
            RETURN v_sums;
        END
    """,
    # Draws room for an owner: for each ask, of all its rooms or of none, at least what it needs and at most what it
    # wants. Asks are served in their order. A look without a lock refuses what surely has no room.
    #
    # ``share``: the most of what is left that goes into one lease beyond the need. ``holds``: the largest amounts that
    # the rooms are asked for at once. ``with_sums``: whether a refusal tells what is spent and unused, by all leases.
    # ``moment``: null for the server's own time; ``clock``: the caller's own. ``is_late`` in the answer: the disk may
    # not have it yet.
    #
    # A balance is tight where the share of what is left does not cover a hold: then nothing is given beyond the need.
    #
    # All asks are reckoned in arrays, between the two statements that lock the rows and the two that change them:
    # statements for each ask would take ten times as long with the rows locked. ``v_amounts`` stands beside ``asks``,
    # where the rooms of one ask are neighbours; the others stand beside the balances; booked is drawn and corrected.
    """take_room(
        owner text, day text, asks integer[], scopes text[], units text[], needs bigint[], wants bigint[],
        holds bigint[], share double precision, with_sums boolean, moment timestamptz, clock timestamptz
    ) RETURNS json LANGUAGE plpgsql""": """
        DECLARE
            v_now timestamptz := coalesce(moment, clock_timestamp());
            v_day date := CAST(day AS date);
            v_periods text[] := ARRAY[day, left(day, 7)];
            v_may_fit boolean;
            v_is_known boolean;
            v_why text;
            v_beat bigint;
            v_scopes text[];
            v_units text[];
            v_of text[];
            v_caps bigint[];
            v_booked bigint[];
            v_since timestamptz[];
            v_holds bigint[];
            v_amounts bigint[];
            v_from integer := 1;
            v_to integer;
            v_fits boolean;
            v_left bigint;
            v_least bigint;
            v_is_tight boolean;
            v_given boolean := false;
            v_refused boolean := false;
            v_is_late boolean := false;
        BEGIN
            SELECT bool_or(of_ask.fits), bool_and(of_ask.is_known) INTO v_may_fit, v_is_known
            FROM (
                SELECT bool_and(balance.cap IS NULL OR room.need <= 0 OR balance.tight_since IS NULL
                                OR room.need <= left_of(balance)) AS fits,
                       bool_and(balance.scope IS NOT NULL AND EXISTS (
                           SELECT FROM leases AS lease
                           WHERE lease.owner = take_room.owner AND lease.scope = room.scope AND lease.unit = room.unit
                             AND lease.day = v_day
                       )) AS is_known
                FROM unnest(asks, scopes, units, needs) AS room (ask, scope, unit, need)
                JOIN unnest(v_periods) AS part (period) ON room.unit = 'nanousd' OR part.period = day
                LEFT JOIN balances AS balance ON balance.scope = room.scope AND balance.unit = room.unit
                                             AND balance.period = part.period
                GROUP BY room.ask
            ) AS of_ask;
            IF v_may_fit THEN
                SELECT CASE
                    WHEN EXISTS (SELECT FROM closed_days WHERE closed_days.day >= v_day) THEN 'closed'
                    WHEN EXISTS (
                        SELECT FROM failovers WHERE v_now < failovers.found_at + interval '30 s' AND EXISTS (
                            SELECT FROM owners AS late
                            WHERE late.ended_at IS NULL AND late.seen_at > failovers.found_at - interval '60 s'
                              AND late.started_at < failovers.found_at
                              AND coalesce(late.set_again_at, '-infinity') < failovers.found_at
                        )
                    ) THEN 'recovering'
                    WHEN abs(extract(epoch FROM clock - v_now)) > 2
                     AND NOT EXISTS (SELECT FROM balances WHERE period = take_room.day) THEN 'clock'
                END
                INTO v_why
                FROM owners WHERE owners.id = owner AND ended_at IS NULL FOR KEY SHARE;
                IF NOT FOUND THEN
                    RETURN json_build_object('refused', 'ended');
                ELSIF v_why IS NOT NULL THEN
                    RETURN json_build_object('refused', v_why, 'beat', count_beat(owner, v_now));
                END IF;
                IF NOT v_is_known THEN
                    INSERT INTO leases (owner, scope, unit, day)
                    SELECT DISTINCT take_room.owner, room.scope COLLATE "C", room.unit COLLATE "C", v_day
                    FROM unnest(scopes, units) AS room (scope, unit)
                    ORDER BY 2, 3
                    ON CONFLICT DO NOTHING;
                END IF;
                PERFORM FROM leases AS lease
                WHERE lease.owner = take_room.owner AND lease.day = v_day AND lease.scope = ANY (scopes)
                ORDER BY lease.scope, lease.unit
                FOR NO KEY UPDATE;
                IF NOT v_is_known THEN
                    PERFORM make_balances(scopes, units, array_fill(day, ARRAY[cardinality(scopes)]));
                END IF;
                SELECT array_agg(book.scope), array_agg(book.unit), array_agg(book.period), array_agg(book.cap),
                       array_agg(book.drawn + book.corrected), array_agg(book.tight_since)
                INTO v_scopes, v_units, v_of, v_caps, v_booked, v_since
                FROM (
                    SELECT * FROM balances AS balance
                    WHERE balance.scope = ANY (scopes) AND balance.period = ANY (v_periods)
                    ORDER BY balance.scope, balance.unit, balance.period
                    FOR NO KEY UPDATE
                ) AS book;
                WHILE v_from <= cardinality(asks) LOOP
                    v_fits := true;
                    v_to := v_from;
                    WHILE asks[v_to] = asks[v_from] LOOP
                        v_least := NULL;
                        v_is_tight := false;
                        FOR v_i IN 1 .. cardinality(v_scopes) LOOP
                            IF v_scopes[v_i] = scopes[v_to] AND v_units[v_i] = units[v_to] THEN
                                v_left := v_caps[v_i] - greatest(v_booked[v_i], 0);
                                v_least := least(v_least, v_left);
                                v_holds[v_i] := greatest(v_holds[v_i], holds[v_to]);
                                v_is_tight := v_is_tight OR v_left IS NOT NULL
                                    AND (v_since[v_i] IS NOT NULL OR share * v_left < holds[v_to]);
                            END IF;
                        END LOOP;
                        v_fits := v_fits AND (v_least IS NULL OR needs[v_to] <= 0 OR needs[v_to] <= v_least);
                        v_amounts[v_to] := CASE
                            WHEN v_is_tight THEN greatest(needs[v_to], 0)
                            WHEN v_least IS NULL THEN greatest(needs[v_to], wants[v_to], 0)
                            ELSE greatest(needs[v_to], least(wants[v_to], floor(share * v_least)), 0)
                        END;
                        v_to := v_to + 1;
                    END LOOP;
                    v_given := v_given OR v_fits;
                    v_refused := v_refused OR NOT v_fits;
                    WHILE v_from < v_to LOOP
                        IF NOT v_fits THEN
                            v_amounts[v_from] := 0;
                        END IF;
                        FOR v_i IN 1 .. cardinality(v_scopes) LOOP
                            IF v_scopes[v_i] = scopes[v_from] AND v_units[v_i] = units[v_from] THEN
                                v_booked[v_i] := v_booked[v_i] + v_amounts[v_from];
                            END IF;
                        END LOOP;
                        v_from := v_from + 1;
                    END LOOP;
                END LOOP;
                FOR v_i IN 1 .. cardinality(v_scopes) LOOP
                    v_left := v_caps[v_i] - greatest(v_booked[v_i], 0);
                    v_is_late := v_is_late OR v_since[v_i] IS NOT NULL;
                    IF v_since[v_i] IS NOT NULL AND share * v_left >= 2 * v_holds[v_i] THEN
                        v_since[v_i] := NULL;
                    ELSIF v_since[v_i] IS NULL AND share * v_left < v_holds[v_i] THEN
                        v_since[v_i] := v_now;
                        PERFORM pg_notify('tollgate_leases', v_scopes[v_i]);
                    END IF;
                END LOOP;
                UPDATE leases AS lease SET granted = lease.granted + given.amount
                FROM (
                    SELECT room.scope, room.unit, CAST(sum(room.amount) AS bigint) AS amount
                    FROM unnest(scopes, units, v_amounts) AS room (scope, unit, amount)
                    GROUP BY room.scope, room.unit
                ) AS given
                WHERE lease.owner = take_room.owner AND lease.day = v_day AND lease.scope = ANY (scopes)
                  AND lease.scope = given.scope AND lease.unit = given.unit AND given.amount > 0;
                UPDATE balances AS balance SET drawn = book.booked - balance.corrected, tight_since = book.since
                FROM unnest(v_scopes, v_units, v_of, v_booked, v_since) AS book (scope, unit, period, booked, since)
                WHERE balance.scope = ANY (scopes) AND balance.period = ANY (v_periods)
                  AND balance.scope = book.scope AND balance.unit = book.unit AND balance.period = book.period
                  AND (balance.drawn + balance.corrected, balance.tight_since)
                      IS DISTINCT FROM (book.booked, book.since);
                v_beat := count_beat(owner, v_now);
                IF v_is_late THEN
                    PERFORM commit_soon();
                END IF;
            ELSE
                v_refused := true;
            END IF;
            RETURN json_build_object(
                'beat', v_beat,
                'is_late', v_given AND v_is_late,
                'leases', (
                    SELECT json_agg(json_build_array(
                        lease.scope, lease.unit, lease.granted, lease.returned, lease.spent
                    ))
                    FROM leases AS lease
                    WHERE lease.owner = take_room.owner AND lease.day = v_day AND lease.scope = ANY (scopes)
                ),
                'balances', (
                    SELECT json_agg(json_build_array(
                        balance.scope, balance.unit, balance.period, balance.cap, balance.drawn, balance.corrected,
                        extract(epoch FROM v_now - balance.tight_since), use.sums[1], use.sums[2]
                    ))
                    FROM balances AS balance, LATERAL (
                        SELECT CASE WHEN v_refused AND with_sums THEN sums_of(balance, owner, v_now) END AS sums
                    ) AS use
                    WHERE balance.scope = ANY (scopes) AND balance.period = ANY (v_periods)
                      AND balance.cap IS NOT NULL
                )
            );
        END
    """,
    # Sets an owner's leases to how they stand by its own books, cumulative: said twice or late it changes nothing, and
    # what rows have spent stays spent. ``is_all``: these are all of its leases, told to a database that has forgotten
    # something; else what it has given back. Returns the owner's beat, or null where it has ended.
    """tell_leases(
        owner text, scopes text[], units text[], days text[], grants bigint[], returns bigint[], is_all boolean,
        moment timestamptz
    ) RETURNS bigint LANGUAGE plpgsql""": """
        DECLARE
            v_scopes text[];
            v_units text[];
            v_days text[];
            v_amounts bigint[];
            v_now timestamptz := coalesce(moment, clock_timestamp());
        BEGIN
            PERFORM FROM owners WHERE owners.id = owner AND ended_at IS NULL FOR KEY SHARE;
            IF NOT FOUND THEN
                RETURN NULL;
            END IF;
            IF is_all THEN
                INSERT INTO leases (owner, scope, unit, day)
                SELECT tell_leases.owner, room.scope, room.unit, CAST(room.day AS date)
                FROM unnest(scopes, units, days) AS room (scope, unit, day)
                ORDER BY room.scope COLLATE "C", room.unit COLLATE "C", room.day
                ON CONFLICT DO NOTHING;
            ELSE
                PERFORM commit_soon();
            END IF;
            WITH said AS (
                SELECT lease.scope, lease.unit, lease.day, lease.granted - lease.returned AS before,
                       greatest(lease.granted, room.granted, greatest(lease.returned, room.returned) + lease.spent)
                           AS granted,
                       greatest(lease.returned, room.returned) AS returned
                FROM unnest(scopes, units, days, grants, returns) AS room (scope, unit, day, granted, returned)
                JOIN leases AS lease ON lease.owner = tell_leases.owner AND lease.scope = ANY (scopes)
                                    AND lease.scope = room.scope AND lease.unit = room.unit
                                    AND lease.day = CAST(room.day AS date)
                ORDER BY lease.scope, lease.unit, lease.day
                FOR NO KEY UPDATE OF lease
            ), changed AS (
                UPDATE leases AS lease SET granted = said.granted, returned = said.returned FROM said
                WHERE lease.owner = tell_leases.owner AND lease.scope = ANY (scopes)
                  AND lease.scope = said.scope AND lease.unit = said.unit AND lease.day = said.day
                  AND (lease.granted, lease.returned) IS DISTINCT FROM (said.granted, said.returned)
                RETURNING lease.scope, lease.unit, to_char(lease.day, 'YYYY-MM-DD') AS day,
                          lease.granted - lease.returned - said.before AS amount
            )
            SELECT array_agg(scope), array_agg(unit), array_agg(day), array_agg(amount)
            INTO v_scopes, v_units, v_days, v_amounts FROM changed;
            IF 0 < ANY (v_amounts) THEN
                PERFORM make_balances(v_scopes, v_units, v_days);
            END IF;
            IF v_scopes IS NOT NULL THEN
                PERFORM draw(v_scopes, v_units, v_days, v_amounts);
            END IF;
            IF is_all THEN
                UPDATE owners SET set_again_at = v_now WHERE owners.id = owner;
            END IF;
            RETURN count_beat(owner, v_now);
        END
    """,
    # Keeps days from being closed and forgotten until the end of the transaction; returns the first day that the ledger
    # remembers, and the last one that is closed. Both as they are once that is so, whatever the statement saw before.
    "open_ledger() RETURNS TABLE (begins date, closed date) ROWS 1 LANGUAGE plpgsql": """
        BEGIN
            PERFORM pg_advisory_xact_lock_shared(hashtext('closed_days'));
            RETURN QUERY SELECT (SELECT memory.begins FROM ledger_memory AS memory),
                                (SELECT max(closed_days.day) FROM closed_days);
        END
    """,
    # Books what new rows of the ledger have spent on the leases of the owners that they name, in the transaction that
    # inserts the rows. Beyond a lease it is a forced grant: a row is never refused for want of room. ``flusher`` is the
    # owner that says so, whose beat is returned; null where it is none, or was not counted. It waits for the disk after
    # its commit: the daily sum of a team that all owners serve is not locked for so long.
    """book_spent(flusher text, owners text[], scopes text[], units text[], days text[], amounts bigint[])
    RETURNS bigint LANGUAGE plpgsql""": """
        DECLARE
            v_scopes text[];
            v_units text[];
            v_days text[];
            v_amounts bigint[];
        BEGIN
            INSERT INTO leases (owner, scope, unit, day)
            SELECT room.owner, room.scope, room.unit, CAST(room.day AS date)
            FROM unnest(owners, scopes, units, days) AS room (owner, scope, unit, day)
            ORDER BY room.owner COLLATE "C", room.scope COLLATE "C", room.unit COLLATE "C", room.day
            ON CONFLICT DO NOTHING;
            PERFORM FROM leases AS lease
            JOIN unnest(owners, scopes, units, days) AS room (owner, scope, unit, day)
              ON lease.owner = room.owner AND lease.scope = room.scope AND lease.unit = room.unit
             AND lease.day = CAST(room.day AS date)
            WHERE lease.owner = ANY (owners) AND lease.scope = ANY (scopes)
            ORDER BY lease.owner, lease.scope, lease.unit, lease.day
            FOR NO KEY UPDATE OF lease;
            WITH booked AS (
                SELECT lease.owner, lease.scope, lease.unit, lease.day, room.amount,
                       greatest(0, lease.returned + lease.spent + room.amount - lease.granted) AS over
                FROM unnest(owners, scopes, units, days, amounts) AS room (owner, scope, unit, day, amount)
                JOIN leases AS lease ON lease.owner = room.owner AND lease.scope = room.scope
                                    AND lease.unit = room.unit AND lease.day = CAST(room.day AS date)
                WHERE lease.owner = ANY (owners) AND lease.scope = ANY (scopes)
            ), changed AS (
                UPDATE leases AS lease
                SET spent = lease.spent + booked.amount, granted = lease.granted + booked.over,
                    overdrawn = lease.overdrawn + booked.over
                FROM booked
                WHERE lease.owner = ANY (owners) AND lease.scope = ANY (scopes)
                  AND lease.owner = booked.owner AND lease.scope = booked.scope AND lease.unit = booked.unit
                  AND lease.day = booked.day
                RETURNING lease.scope, lease.unit, to_char(lease.day, 'YYYY-MM-DD') AS day, booked.over
            )
            SELECT array_agg(scope), array_agg(unit), array_agg(day), array_agg(over)
            INTO v_scopes, v_units, v_days, v_amounts FROM changed WHERE over > 0;
            IF v_scopes IS NOT NULL THEN
                PERFORM make_balances(v_scopes, v_units, v_days);
                PERFORM draw(v_scopes, v_units, v_days, v_amounts);
            END IF;
            IF flusher <> '' THEN
                PERFORM commit_soon();
            END IF;
            RETURN nullif(count_beat(flusher, NULL), 0);
        END
    """,
    # Ends an owner whose last segment has been carried to the ledger: what it has not spent goes back. Returns whether
    # it was there and had not ended.
    "end_owner(owner text, moment timestamptz) RETURNS boolean LANGUAGE plpgsql": """
        DECLARE
            v_scopes text[];
            v_units text[];
            v_days text[];
            v_amounts bigint[];
        BEGIN
            PERFORM FROM owners WHERE owners.id = owner AND ended_at IS NULL FOR UPDATE;
            IF NOT FOUND THEN
                RETURN false;
            END IF;
            UPDATE owners SET ended_at = coalesce(moment, clock_timestamp()) WHERE owners.id = owner;
            WITH idle AS (
                SELECT lease.scope, lease.unit, lease.day, lease.granted - lease.returned - lease.spent AS amount
                FROM leases AS lease
                WHERE lease.owner = end_owner.owner AND lease.granted > lease.returned + lease.spent
                ORDER BY lease.scope, lease.unit, lease.day
                FOR NO KEY UPDATE
            ), changed AS (
                UPDATE leases AS lease SET returned = lease.granted - lease.spent FROM idle
                WHERE lease.owner = end_owner.owner AND lease.scope = idle.scope AND lease.unit = idle.unit
                  AND lease.day = idle.day
                RETURNING lease.scope, lease.unit, to_char(lease.day, 'YYYY-MM-DD') AS day, -idle.amount AS amount
            )
            SELECT array_agg(scope), array_agg(unit), array_agg(day), array_agg(amount)
            INTO v_scopes, v_units, v_days, v_amounts FROM changed;
            IF v_scopes IS NOT NULL THEN
                PERFORM draw(v_scopes, v_units, v_days, v_amounts);
            END IF;
            RETURN true;
        END
    """,
    # Adds a signed correction to the balances of its day and month, even past a cap.
    """correct_balances(scopes text[], day text, tokens bigint, nanousd bigint) RETURNS void LANGUAGE plpgsql""": """
        BEGIN
            PERFORM make_balances(
                scopes || scopes,
                array_fill('tokens'::text, ARRAY[cardinality(scopes)])
                    || array_fill('nanousd'::text, ARRAY[cardinality(scopes)]),
                array_fill(day, ARRAY[2 * cardinality(scopes)])
            );
            PERFORM FROM balances AS balance
            WHERE balance.scope = ANY (scopes) AND balance.period IN (day, left(day, 7))
            ORDER BY balance.scope, balance.unit, balance.period
            FOR NO KEY UPDATE;
            UPDATE balances AS balance
            SET corrected = balance.corrected + CASE balance.unit WHEN 'tokens' THEN tokens ELSE nanousd END
            WHERE balance.scope = ANY (scopes) AND balance.period IN (day, left(day, 7));
        END
    """,
    # Sets the caps of a scope's open balances to what its row says, in the transaction that changed it. Where more than
    # the new cap is drawn, the owners are called to return what they do not use. How tight the others are shows at the
    # next grant: what was drawn since a limit was taken away was drawn untold of any.
    "follow_limits(of text, moment timestamptz DEFAULT NULL) RETURNS void LANGUAGE plpgsql": """
        BEGIN
            PERFORM FROM balances AS balance WHERE balance.scope = of
            ORDER BY balance.scope, balance.unit, balance.period
            FOR NO KEY UPDATE;
            UPDATE balances AS balance
            SET cap = cap_of(balance.scope, balance.unit, balance.period), tight_since = NULL
            WHERE balance.scope = of;
            UPDATE balances AS balance SET tight_since = coalesce(moment, clock_timestamp())
            WHERE balance.scope = of AND left_of(balance) < 0;
            IF FOUND THEN
                PERFORM pg_notify('tollgate_leases', of);
            END IF;
        END
    """,
}
