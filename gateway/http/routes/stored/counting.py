# What is stored is used within a limit of its own: each use asks Postgres, and none counts against a rate.

from __future__ import annotations

from gateway.core.errors import EndpointNotAllowed
from gateway.dialects.options import check_endpoint
from gateway.dialects.table import FOR_BATCHES
from gateway.http.exchange import AnyRequest, caller_of, part_of
from gateway.overload.read_limit import StoredLimit

BATCHED = frozenset(endpoint.name for endpoint in FOR_BATCHES.values())


def counted_team(request: AnyRequest, endpoint: str | None = None) -> str:
    """Count a use of stored responses, conversations, batches or files, and return whose it is. ``endpoint``: by which
    it was stored, unsaid any that batches take: keys that may not call it read and change none of that. Raises
    RateLimited, EndpointNotAllowed."""
    caller = caller_of(request)
    if endpoint is not None:
        check_endpoint(caller, endpoint)
    elif caller.key_endpoints is not None and caller.key_endpoints.isdisjoint(BATCHED):
        raise EndpointNotAllowed("This key may call no endpoint that batches take: it opens no batch and no file.")
    team_id = caller.team.id
    part_of(request, StoredLimit).take(team_id)
    return team_id
