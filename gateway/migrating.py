# `tollgate migrate`: the schema brought to this version, as soon as there is a database to bring it to.

from __future__ import annotations

import time

from sqlalchemy.exc import DBAPIError

import migrations

PAUSE = 0.1  # seconds between tries


def migrate_when_reachable(database_url: str, wait: float) -> None:
    """Migrate to the newest version; raise OSError when Postgres does not take connections within ``wait`` seconds."""
    deadline = time.monotonic() + wait
    while True:
        try:
            migrations.upgrade(database_url)
        except (OSError, DBAPIError) as exc:
            if isinstance(exc, PermissionError):  # a file of the driver's that we may not read: waiting will not help
                raise
            # SQLSTATE 57P03: Postgres is up, but still starting.
            if isinstance(exc, DBAPIError) and getattr(exc.orig, "sqlstate", None) != "57P03":
                raise
            if time.monotonic() > deadline:
                raise OSError(str(exc)) from exc
            time.sleep(PAUSE)
        else:
            return
