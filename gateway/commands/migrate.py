# `tollgate migrate`: the schema brought to this version, as soon as there is a database to bring it to, and without
# blocking the processes that use it.

from __future__ import annotations

import time

from alembic.util import CommandError
from sqlalchemy.exc import DBAPIError

import migrations
from gateway.storage.schema import FIRST, NEEDED, find_schema

PAUSE = 0.1  # seconds between tries
FREE_WITHIN = 60.0  # seconds in which the tables must be had for a moment
STARTING, IN_USE = "57P03", "55P03"  # SQLSTATE: Postgres is up, but still starting; a lock was not had in time


class IsNewer(Exception):
    """The database is a later version's. This version runs beside that one, so there is nothing to do."""


class IsUnreleased(Exception):
    """The database is of before the first release, from which the migrations begin."""


class TableInUse(Exception):
    """Another session locks a table that a migration changes, longer than we try."""


def migrate_when_reachable(database_url: str, wait: float) -> None:
    """Migrate to this version.

    Raises IsNewer; IsUnreleased; TableInUse; OSError when Postgres does not take connections within ``wait`` seconds.
    """
    began = time.monotonic()
    while True:
        try:
            return migrations.upgrade(database_url)
        except CommandError as exc:
            if (found := find_schema(database_url)) and found > NEEDED:
                raise IsNewer(
                    f"The database has the schema {found}, newer than this version's {NEEDED}: left as it is."
                ) from exc
            if found and found < FIRST:
                told = f"The database has the schema {found}, of before version 1.0.0: migrate it with that one first."
                raise IsUnreleased(told) from exc
            raise
        except (OSError, DBAPIError) as exc:
            if isinstance(exc, PermissionError):  # a file of the driver's that we may not read: waiting will not help
                raise
            state = getattr(exc.orig, "sqlstate", None) if isinstance(exc, DBAPIError) else STARTING
            if state not in (STARTING, IN_USE):
                raise
            if state == IN_USE and time.monotonic() - began > FREE_WITHIN:
                raise TableInUse(
                    f"Another transaction keeps a table that this changes, for {FREE_WITHIN:.0f} s by now. Nothing was "
                    "done. End it (pg_stat_activity: state 'idle in transaction') and try again."
                ) from exc
            if state == STARTING and time.monotonic() - began > wait:
                raise OSError(str(exc)) from exc
            time.sleep(PAUSE)
