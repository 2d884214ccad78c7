# What a team may have stored here: tokens that wait in its batches, and bytes of files. More than that is refused.
# Transactions check the limit and store under the team's lock, so that concurrent ones cannot exceed it; the lock
# is their last step, so that none holds a connection while it waits for a long upload.

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.core.errors import BatchQueueFull, StorageFull
from gateway.core.settings import BatchLimits

BYTES_PER_TOKEN = 4  # of input, about: English prose; what is counted must be known before anything is read


async def lock_limits(connection: AsyncConnection, team_id: str) -> None:
    """Take the team's lock: until this transaction ends, no other adds to what the team has here."""
    await connection.execute(LOCK, {"team_id": team_id})


async def check_queue(connection: AsyncConnection, limits: BatchLimits, team_id: str, size: int) -> None:
    """Raise BatchQueueFull if ``size`` more bytes of requests are more than a team may have waiting."""
    queued = int((await connection.execute(QUEUED, {"team_id": team_id})).scalar_one())
    if tokens_of(queued + size) > limits.queued_tokens:
        raise BatchQueueFull(
            f"Enqueued token limit reached for the team '{team_id}'. Limit: {limits.queued_tokens:,} tokens; with this "
            f"batch about {tokens_of(queued + size):,} would wait. Send it once others have been completed, or in "
            "smaller parts."
        )


async def check_storage(connection: AsyncConnection, limits: BatchLimits, team_id: str, size: int) -> None:
    """Raise StorageFull if ``size`` more bytes are more than a team may store."""
    stored = int((await connection.execute(STORED, {"team_id": team_id})).scalar_one())
    if stored + size > limits.stored_bytes:
        raise StorageFull(
            f"The team '{team_id}' would store {stored + size:,} bytes here; its limit is {limits.stored_bytes:,}. "
            "Delete files that are not needed any more: DELETE /v1/files/{file_id}."
        )


def tokens_of(size: int) -> int:
    """Return the tokens that ``size`` bytes of input count as."""
    return -(-size // BYTES_PER_TOKEN)


LOCK = text("SELECT pg_advisory_xact_lock(hashtext('batch limits of ' || :team_id))")
# Of a batch that runs, what has not ended counts; of one that is still checked, all.
OPEN_BYTES = """
    SELECT coalesce(sum(CASE WHEN total = 0 THEN input_bytes
                             ELSE input_bytes * greatest(total - completed - failed, 0) / total END), 0)
    FROM batches WHERE team_id = :team_id AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling')
"""
QUEUED = text(OPEN_BYTES)
# An upload counts as far as it came, also an aborted one. Requests that came without a file are stored here until
# they have ended.
STORED = text(f"""
    SELECT coalesce((SELECT sum(bytes) FROM files
                     WHERE team_id = :team_id AND (expires_at > now() OR status = 'uploading')), 0)
           + ({OPEN_BYTES} AND input_file_id IS NULL)
""")  # noqa: S608  (all of it is ours)
