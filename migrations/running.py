# Migrations that old and new processes cannot live beside: they are for a house that stands still.

from __future__ import annotations

from sqlalchemy import Connection, text

SEEN_WITHIN = 30.0  # seconds; processes say every ten that they run


class StillRunning(Exception):
    """Processes of the version before are running, or were until a moment ago."""


def refuse_while_running(connection: Connection, table: str) -> None:
    """Raise StillRunning while processes are listed in ``table`` that were seen lately."""
    seen = text(
        f"SELECT id FROM {table} WHERE seen_at > clock_timestamp() - make_interval(secs => :within) ORDER BY id"  # noqa: S608
    )
    if found := connection.execute(seen, {"within": SEEN_WITHIN}).scalars().all():
        raise StillRunning(
            f"{len(found)} gateways and workers of the version before were seen in the last {SEEN_WITHIN:.0f} s "
            f"({', '.join(found[:5])}{', …' if len(found) > 5 else ''}). This step is for a house that stands still: "
            f"stop them all, wait {SEEN_WITHIN:.0f} s, migrate, and start this version. Nothing was done."
        )
