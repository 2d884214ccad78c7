# The caller of a request: a team by one of its keys, or an admin. auth.py looks them up, teams.py changes them.

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from hashlib import blake2b
from typing import Literal

from msgspec import Raw, Struct

from billing.core.holds import Limits, NamedLimits
from gateway.core.client_addresses import Networks
from gateway.core.settings import CacheUse, TeamSafety
from protocol.errors import Unshown

# Every change to a team or a key is announced on this Postgres channel, in the transaction that makes it; the payload
# is the team's id. Gateways drop what they remember of that team.
ACCESS_CHANNEL = "tollgate_access"

# When a team's calls go with the deployment's keys: at providers where it has none of its own, also behind its own
# where those fail, or not at all (but at our own engines, which need none).
CompanyKeys = Literal["otherwise", "fallback", "never"]
OwnKeyCost = Literal["none", "list"]  # what calls with a team's own keys cost its budgets: nothing, or the full price

WithoutUser = Literal["refuse", "count"]  # calls that name no end user: 400, or they share one user's limits


class TeamContents(Struct, frozen=True):
    """That the contents of a team's calls are kept, and for how long."""

    keep_days: int


class Team(Unshown, Struct, frozen=True, kw_only=True):
    """A team and what it may do."""

    id: str
    name: str
    weight: float = 1.0
    allowed_models: frozenset[str] | None = None  # None: all
    allow_smaller: bool = True  # overload may move its requests to smaller models
    safety: TeamSafety | None = None  # its own levels; None: the deployment's
    limits: Limits = Limits()
    model_limits: Mapping[str, Limits] = {}  # for one model each; one whose limits were taken away stays, with none
    user_limits: Mapping[str, NamedLimits] = {}  # of end users by hash, and "*": of each that has none of its own
    tag_limits: Mapping[str, Mapping[str, NamedLimits]] = {}  # of values of metadata, by key; of each as of end users
    calls_without_user: WithoutUser = "refuse"  # where each end user has limits
    hash_key: str = ""  # by which the values of this team are hashed
    provider_keys: Mapping[str, tuple[tuple[str, bytes], ...]] = {}  # its own, by provider: the id of each, and sealed
    company_keys: CompanyKeys = "otherwise"
    own_key_cost: OwnKeyCost = "none"
    contents: TeamContents | None = None  # of its calls; None: they are stored nowhere
    is_suspended: bool = False

    def hash_of(self, value: str) -> str:
        """Return what stands for an end user or a tag's value where names may not stand: 32 hexadecimal digits."""
        return blake2b(value.encode("utf-8", "replace"), key=self.hash_key.encode(), digest_size=16).hexdigest()


class ClientSecret(Unshown, Struct, frozen=True, kw_only=True):
    """What opens conversations by voice with one model, for some time."""

    digests: dict[str, bytes]  # of the key that it was made with, by the names of peppers
    model: str
    session: Raw  # what each of them begins with, as JSON
    user: str | None  # the end user whose they are
    expires_at: float  # unix seconds


class Caller(Struct, frozen=True, kw_only=True):
    """A team, known by one of its keys."""

    team: Team
    key_id: str
    key_name: str = ""
    key_limits: Limits = Limits()
    key_models: frozenset[str] | None = None  # what it may ask for, of what the team may; None: all
    key_endpoints: frozenset[str] | None = None  # which inference endpoints it may call; None: all
    addresses: Networks | None = None  # whence it may call; None: from everywhere
    expires_at: float | None = None  # unix seconds
    cache: CacheUse | None = None  # of calls that do not say; None: as the name that they ask for
    secret: ClientSecret | None = None  # by which it calls, in the place of its key


class Role(StrEnum):
    """What an admin key is for. Which routes let it in stands in gateway/accounts/guards.py."""

    VIEWER = "viewer"  # sees everything, changes nothing
    FINANCE = "finance"  # and books corrections
    OPERATOR = "operator"  # and handles breakers, callbacks and what runs
    TEAM_ADMIN = "team-admin"  # one team's keys and webhook secrets, and what that team may see
    ADMIN = "admin"  # everything


class Admin(Struct, frozen=True):
    """A holder of an admin key, or a person who has signed in. ``fingerprint`` tells which key, without the key: of a
    stored one it is the id."""

    fingerprint: str
    role: Role = Role.ADMIN
    team_id: str | None = None  # whose admin it is; none: not of one team
    expires_at: float | None = None  # unix seconds
    name: str = ""  # of the key
    person: str | None = None  # who has signed in, as the identity provider knows them; none: a key

    @property
    def actor(self) -> str:
        """Who acts, for the audit log."""
        return f"admin:{self.fingerprint}" if self.person is None else f"person:{self.person}"

    @property
    def sees_costs(self) -> bool:
        """Whether it may know what the operator's own GPUs cost: a team's admin sees what its team does."""
        return self.team_id is None


class Person(Struct, frozen=True, kw_only=True):
    """Who has signed in, and as what."""

    subject: str  # as the issuer knows them, for ever
    email: str | None
    role: Role
    team_id: str | None = None

    @property
    def name(self) -> str:
        """The person in the audit log. The subject alone tells who it is: an address may pass to another."""
        return self.subject if self.email is None else f"{self.email} ({self.subject})"


class TokenKey(Struct, frozen=True):
    """The key that a token stands for: one for each issuer, team and value of the claim."""

    issuer: str
    team_id: str
    value: str

    @property
    def secret(self) -> str:
        """What the key is stored by in the place of a secret. No request can carry it: no key looks so."""
        return f"jwt\0{self.issuer}\0{self.team_id}\0{self.value}"
