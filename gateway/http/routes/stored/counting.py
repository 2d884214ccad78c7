# What is stored is used within a limit of its own: each use asks Postgres, and none counts against a rate.

from __future__ import annotations

from gateway.dialects.options import check_endpoint
from gateway.http.exchange import AnyRequest, caller_of, part_of
from gateway.overload.read_limit import StoredLimit


def counted_team(request: AnyRequest, endpoint: str | None = None) -> str:
    """Count a use of stored responses, conversations, batches or files, and return whose it is. ``endpoint``: by which
    it was stored: keys that may not call it read and change none of that. Raises RateLimited, EndpointNotAllowed."""
    if endpoint is not None:
        check_endpoint(caller_of(request), endpoint)
    team_id = caller_of(request).team.id
    part_of(request, StoredLimit).take(team_id)
    return team_id
