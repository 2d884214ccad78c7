# The caller of a request: a team by one of its keys, or an admin. auth.py looks them up, teams.py changes them.

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from billing.core.holds import Limits
from gateway.core.client_addresses import Networks
from gateway.core.settings import CacheUse, TeamSafety

# Every change to a team or a key is announced on this Postgres channel, in the transaction that makes it; the payload
# is the team's id. Gateways drop what they remember of that team.
ACCESS_CHANNEL = "tollgate_access"


class Team(Struct, frozen=True, kw_only=True):
    """A team and what it may do."""

    id: str
    name: str
    weight: float = 1.0
    allowed_models: frozenset[str] | None = None  # None: all
    allow_smaller: bool = True  # overload may move its requests to smaller models
    safety: TeamSafety | None = None  # its own levels; None: the deployment's
    limits: Limits = Limits()
    is_suspended: bool = False


class Caller(Struct, frozen=True, kw_only=True):
    """A team, known by one of its keys."""

    team: Team
    key_id: str
    key_name: str = ""
    key_limits: Limits = Limits()
    key_models: frozenset[str] | None = None  # what it may ask for, of what the team may; None: all
    addresses: Networks | None = None  # whence it may call; None: from everywhere
    expires_at: float | None = None  # unix seconds
    cache: CacheUse | None = None  # of calls that do not say; None: as the name that they ask for


class Role(StrEnum):
    """What an admin key is for. Which routes let it in stands in gateway/accounts/guards.py."""

    VIEWER = "viewer"  # sees everything, changes nothing
    FINANCE = "finance"  # and books corrections
    OPERATOR = "operator"  # and handles breakers, callbacks and what runs
    TEAM_ADMIN = "team-admin"  # one team's keys and webhook secrets, and what that team may see
    ADMIN = "admin"  # everything


class Admin(Struct, frozen=True):
    """A holder of an admin key. ``fingerprint`` tells which key in the audit log, without the key: of a stored one it
    is the id."""

    fingerprint: str
    role: Role = Role.ADMIN
    team_id: str | None = None  # whose admin it is; none: not of one team
    expires_at: float | None = None  # unix seconds
