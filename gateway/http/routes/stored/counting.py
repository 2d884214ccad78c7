# What is stored is used within a limit of its own: each use asks Postgres, and none counts against a rate.

from __future__ import annotations

from gateway.http.exchange import AnyRequest, caller_of, part_of
from gateway.overload.read_limit import StoredLimit


def counted_team(request: AnyRequest) -> str:
    """Count a use of stored responses, conversations, batches or files, and return whose it is. Raises RateLimited."""
    team_id = caller_of(request).team.id
    part_of(request, StoredLimit).take(team_id)
    return team_id
