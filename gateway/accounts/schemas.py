# What an admin may say of a team or a key, over HTTP or on the command line, and what is wrong with it if it cannot be.
# Money comes in dollars and leaves here in nano-dollars.

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from difflib import get_close_matches
from ipaddress import ip_network
from typing import TypeVar

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import asdict, replace

from billing.core.holds import Limits, NamedLimits
from billing.core.money import to_nano
from gateway.core.clock import read_duration
from gateway.core.principals import CompanyKeys, OwnKeyCost, Role, Team, TeamContents, WithoutUser
from gateway.core.settings import CacheUse, FindingLevel, Level, Redacts, Safety, TeamSafety
from gateway.egress.addresses import Network
from gateway.egress.destinations import Guard
from gateway.egress.urls import BadUrl, read_url
from gateway.moderation.rules.policy import NAMES, REDACTABLE, loosens
from protocol.errors import BadRequest, Unshown, invalid_param, invalid_value

MOST_DOLLARS = 1_000_000_000
MOST_COUNT = 10**15
LONGEST_NAME = 200  # characters
LEAST_PROVIDER_KEY, LONGEST_PROVIDER_KEY = 8, 1000  # characters
MOST_MODELS = 100  # with limits of their own, of one team: each of its rows is compared with them
MOST_NAMED = 100  # end users, or tags, with limits of their own, of one team: what is known of a caller holds them
LONGEST_VALUE = 512  # characters, as of metadata
MOST_RANGES = 100  # of addresses, of one key: each call is compared with them
LONGEST_OVERLAP = 90 * 86400.0  # seconds
LEAST_OWN_OVERLAP = 60.0  # seconds, where a team rotates: nor does it rotate again before its end
NO_LIMITS = Limits()

_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


class SafetyInput(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A team's own safety levels. Absent: unchanged; null: the deployment's; ``levels`` are changed one by one."""

    input: Level | UnsetType | None = UNSET
    output: Level | UnsetType | None = UNSET
    levels: dict[str, FindingLevel | None] | UnsetType | None = UNSET
    redacts: Redacts | UnsetType | None = UNSET


class LimitsInput(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits to set. Absent: as it is; null: no limit."""

    requests_per_minute: int | UnsetType | None = UNSET
    tokens_per_minute: int | UnsetType | None = UNSET
    concurrent_requests: int | UnsetType | None = UNSET
    tokens_per_day: int | UnsetType | None = UNSET
    usd_per_day: Decimal | UnsetType | None = UNSET
    usd_per_month: Decimal | UnsetType | None = UNSET


class ModelLimitsInput(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a team for one model, end user or tag. Absent: as it is; null: no limit."""

    tokens_per_day: int | UnsetType | None = UNSET
    usd_per_day: Decimal | UnsetType | None = UNSET
    usd_per_month: Decimal | UnsetType | None = UNSET


class NewTeam(Unshown, Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A team to create."""

    id: str
    name: str | None = None
    weight: float = 1.0
    allowed_models: list[str] | None = None
    allow_smaller: bool = True
    safety: SafetyInput | None = None
    limits: LimitsInput | None = None
    model_limits: dict[str, ModelLimitsInput | None] | None = None  # by model
    user_limits: dict[str, ModelLimitsInput | None] | None = None  # by end user; "*": of each other one
    tag_limits: dict[str, ModelLimitsInput | None] | None = None  # by KEY=VALUE of metadata; KEY=*: of each other value
    calls_without_user: WithoutUser = "refuse"  # where each end user has limits; "count": as those of one end user
    webhook_url: str | None = None
    cost_centre: str | None = None  # to which its cost goes, as finance names it
    company_keys: CompanyKeys = "otherwise"  # when its calls go with the deployment's keys of providers
    own_key_cost: OwnKeyCost = "none"  # what calls with its own keys cost its budgets
    contents: TeamContents | None = None  # for how many days what is asked and answered is kept; null: not at all


class TeamPatch(Unshown, Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes to a team: what is absent stays as it is, null takes a value away."""

    name: str | UnsetType = UNSET
    weight: float | UnsetType = UNSET
    allowed_models: list[str] | UnsetType | None = UNSET
    allow_smaller: bool | UnsetType = UNSET
    safety: SafetyInput | UnsetType | None = UNSET
    limits: LimitsInput | UnsetType | None = UNSET
    model_limits: dict[str, ModelLimitsInput | None] | UnsetType | None = UNSET  # models not named keep theirs
    user_limits: dict[str, ModelLimitsInput | None] | UnsetType | None = UNSET  # likewise; null: as each other one
    tag_limits: dict[str, ModelLimitsInput | None] | UnsetType | None = UNSET
    calls_without_user: WithoutUser | UnsetType = UNSET
    webhook_url: str | UnsetType | None = UNSET
    cost_centre: str | UnsetType | None = UNSET
    company_keys: CompanyKeys | UnsetType = UNSET
    own_key_cost: OwnKeyCost | UnsetType = UNSET
    contents: TeamContents | UnsetType | None = UNSET  # null erases what is kept
    suspended: bool | UnsetType = UNSET


Webhooked = TypeVar("Webhooked", NewTeam, TeamPatch)


class NewKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key to create."""

    team_id: str
    name: str = ""
    expires_at: datetime | float | None = None  # RFC 3339, or unix seconds
    limits: LimitsInput | None = None
    allowed_models: list[str] | None = None  # of those that the team may use; null: all of them
    allowed_addresses: list[str] | None = None  # whence it may call, such as 10.20.0.0/16; null: from everywhere
    allowed_endpoints: list[str] | None = None  # which it may call, such as embeddings; null: all
    cache: CacheUse | None = None  # whether its calls go by the cache; null: as the model that they ask for


class KeyPatch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes to a key: what is absent stays as it is, null takes a value away."""

    name: str | UnsetType = UNSET
    expires_at: datetime | float | UnsetType | None = UNSET
    limits: LimitsInput | UnsetType | None = UNSET
    allowed_models: list[str] | UnsetType | None = UNSET
    allowed_addresses: list[str] | UnsetType | None = UNSET
    allowed_endpoints: list[str] | UnsetType | None = UNSET
    cache: CacheUse | UnsetType | None = UNSET


class NewAdminKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An admin key to create. ``team_id``: whose, for the role ``team-admin`` and no other."""

    role: Role
    team_id: str | None = None
    name: str = ""
    expires_at: datetime | float | None = None  # RFC 3339, or unix seconds


class NewProviderKey(Unshown, Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key of a provider, for the calls of one team alone."""

    provider: str  # as tollgate.yaml names it
    key: str
    name: str = ""

    def __repr__(self) -> str:
        """Say whose key it is, and no key."""
        return f"NewProviderKey(provider={self.provider!r})"


class ProviderKeyRotation(Unshown, Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What takes the place of a team's key of a provider, at once."""

    key: str

    def __repr__(self) -> str:
        """Say what it is, and no key."""
        return "ProviderKeyRotation()"


class Rotation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to replace a key. ``overlap``: how long the old one still works, ``24h`` or seconds."""

    overlap: str | float = "24h"
    expires_at: datetime | float | UnsetType | None = UNSET  # of the new key; absent: as the old one's


class OwnRotation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a team replaces the secret of its key. ``overlap``: how long the old one still works, ``24h`` or seconds."""

    overlap: str | float = "24h"


def is_id(text: str) -> bool:
    """Tell whether ``text`` could be a team's id at all."""
    return _ID.fullmatch(text) is not None


def check_id(team_id: str) -> str:
    """Return ``team_id`` if it can be one. Raises BadRequest."""
    if is_id(team_id):
        return team_id
    right = "is 1 to 64 lower-case letters, digits, '-' and '_', and begins with a letter or digit"
    raise invalid_param("id", f"A team's 'id' {right}.")


def check_name(name: str, field: str = "name") -> str:
    """Return ``name`` without surrounding spaces if it can be shown. Raises BadRequest."""
    name = name.strip()
    if len(name) <= LONGEST_NAME and all(character.isprintable() for character in name):
        return name
    raise invalid_value(field, f"must be printable and at most {LONGEST_NAME} characters long")


def check_provider_key(key: str) -> str:
    """Return a key of a provider that can travel in a header. Raises BadRequest, which does not tell it."""
    key = key.strip()
    if (
        LEAST_PROVIDER_KEY <= len(key) <= LONGEST_PROVIDER_KEY
        and key.isascii()
        and key.isprintable()
        and " " not in key
    ):
        return key
    right = f"must be {LEAST_PROVIDER_KEY} to {LONGEST_PROVIDER_KEY} printable characters of ASCII without spaces"
    raise invalid_value("key", right)


def check_webhook_url(url: str | None) -> str | None:
    """Return ``url`` in its one form. Raises BadRequest. `with_checked_webhook` has checked its addresses before."""
    try:
        return None if url is None else read_url(url).text
    except BadUrl as exc:
        raise BadRequest(f"'webhook_url' {exc}.", param="webhook_url", code="invalid_callback_url") from None


async def with_checked_webhook(wanted: Webhooked, allow: Sequence[Network]) -> Webhooked:
    """Return ``wanted`` if callbacks may go where its webhook leads. Raises BadRequest. Not inside a transaction."""
    if wanted.webhook_url is UNSET or wanted.webhook_url is None:
        return wanted
    return replace(wanted, webhook_url=await Guard(allow).check(wanted.webhook_url, "webhook_url"))


def check_contents(wanted: TeamContents | UnsetType | None, most: float) -> None:
    """Refuse to keep contents for longer than ``most`` seconds, the deployment's retention. Raises BadRequest."""
    days = int(most / 86_400)
    if not isinstance(wanted, TeamContents) or 1 <= wanted.keep_days <= days:
        return
    if days < 1:
        raise invalid_value("contents", "must be null: less than a day is kept here (retention.contents)")
    raise invalid_value("contents.keep_days", f"must be 1 to {days} here (retention.contents)")


def check_safety(wanted: SafetyInput | UnsetType | None, deployment: Safety) -> None:
    """Refuse a policy that the deployment's settings do not allow a team. Raises BadRequest."""
    if not isinstance(wanted, SafetyInput):
        return
    said = apply_safety(wanted)
    if said is not None and (looser := loosens(said, deployment)) is not None:
        right = f"'{looser[1]}' or stricter, unless safety.teams_may_loosen says otherwise"
        raise invalid_value(f"safety.{looser[0]}", f"is looser than the deployment's: it must be {right}")


def apply_safety(wanted: SafetyInput | None, before: TeamSafety | None = None) -> TeamSafety | None:
    """Return ``before`` with what ``wanted`` says; None where nothing is left of it. Raises BadRequest."""
    if wanted is None:
        return None
    before = before or TeamSafety()
    levels: dict[str, FindingLevel] = {} if wanted.levels is None else dict(before.levels)
    for name, level in wanted.levels.items() if isinstance(wanted.levels, dict) else ():
        if name not in NAMES:
            raise invalid_value(f"safety.levels.{name[:40]}", f"is no group or category; known are {', '.join(NAMES)}")
        if level == "redact" and name not in REDACTABLE:
            raise invalid_value(f"safety.levels.{name}", f"cannot be redacted; {', '.join(REDACTABLE)} can")
        if level is None:
            levels.pop(name, None)
        else:
            levels[name] = level
    after = TeamSafety(
        input=before.input if wanted.input is UNSET else wanted.input,
        output=before.output if wanted.output is UNSET else wanted.output,
        levels=levels,
        redacts=before.redacts if wanted.redacts is UNSET else wanted.redacts,
    )
    return None if after == TeamSafety() else after


def check_weight(weight: float) -> float:
    """Return ``weight`` if it is a share. Raises BadRequest."""
    if 0 < weight <= 1000:
        return weight
    raise invalid_value("weight", "must be above 0 and at most 1000")


def check_models(names: list[str] | None, known: Collection[str] | None) -> list[str] | None:
    """Return ``names`` without repetitions if all are known. Raises BadRequest. ``known`` None: anything goes."""
    for place, name in enumerate(names or ()):
        if known is not None and name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"Did you mean '{close[0]}'?" if close else f"There are: {', '.join(sorted(known))}."
            raise invalid_param(f"allowed_models[{place}]", f"There is no model '{name[:100]}'. {hint}")
    return None if names is None else list(dict.fromkeys(names))


def check_addresses(ranges: list[str] | None) -> list[str] | None:
    """Return ranges of addresses in their one form, without repetitions. Raises BadRequest."""
    if ranges is None:
        return None
    if len(ranges) > MOST_RANGES:
        raise invalid_value("allowed_addresses", f"has {len(ranges)} ranges; {MOST_RANGES} are the most")
    read = []
    for place, said in enumerate(ranges):
        try:
            read.append(str(ip_network(said.strip())))
        except ValueError as exc:
            right = "must be an address or a range such as 203.0.113.7, 10.20.0.0/16 or 2001:db8::/48"
            raise invalid_value(f"allowed_addresses[{place}]", f"{right} ({str(exc)[:100]})") from None
    return list(dict.fromkeys(read))


def apply_model_limits(
    wanted: Mapping[str, ModelLimitsInput | None] | None, before: Mapping[str, Limits], known: Collection[str] | None
) -> dict[str, Limits]:
    """Return ``before`` with what ``wanted`` says; a model once named stays, if without limits. ``known``: the models
    of the catalogue, when they are known. Raises BadRequest."""
    if wanted is None:
        return dict.fromkeys(before, NO_LIMITS)
    after = dict(before)
    for name, limits in wanted.items():
        place = f"model_limits.{name[:100]}"
        if name not in before and known is not None and name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"Did you mean '{close[0]}'?" if close else f"There are: {', '.join(sorted(known))}."
            words = f"No model is named '{name[:100]}', and limits are of models, not of aliases or routes."
            raise invalid_param(place, f"{words} {hint}")
        after[name] = apply_limits(limits, before.get(name, NO_LIMITS), place)
    if len(after) > MOST_MODELS:
        raise invalid_value("model_limits", f"are of {len(after)} models; {MOST_MODELS} are the most")
    return after


def apply_user_limits(wanted: Mapping[str, ModelLimitsInput | None] | None, before: Team) -> dict[str, NamedLimits]:
    """Return the team's limits of end users with what ``wanted`` says. Raises BadRequest."""
    after = _apply_named("user_limits", wanted, {one.name: one.limits for one in before.user_limits.values()})
    return {_place_of(before, name): NamedLimits(name, limits) for name, limits in after.items()}


def apply_tag_limits(
    wanted: Mapping[str, ModelLimitsInput | None] | None, before: Team
) -> dict[str, dict[str, NamedLimits]]:
    """Return the team's limits of tags, by key, with what ``wanted`` says. Raises BadRequest."""
    known = {one.name: one.limits for of_key in before.tag_limits.values() for one in of_key.values()}
    found: dict[str, dict[str, NamedLimits]] = {}
    for name, limits in _apply_named("tag_limits", wanted, known).items():
        key, _, value = name.partition("=")
        if not key or not value:
            raise invalid_param("tag_limits", "A tag is KEY=VALUE as in 'metadata', such as agent=research, or KEY=*.")
        found.setdefault(key, {})[_place_of(before, value)] = NamedLimits(name, limits)
    return found


def _apply_named(
    field: str, wanted: Mapping[str, ModelLimitsInput | None] | None, before: Mapping[str, Limits]
) -> dict[str, Limits]:
    after = {} if wanted is None else dict(before)
    for name, limits in (wanted or {}).items():
        if not 0 < len(name) <= LONGEST_VALUE or not name.isprintable():
            raise invalid_value(field, f"has names of 1 to {LONGEST_VALUE} printable characters; found {name[:40]!a}")
        after[name] = apply_limits(limits, before.get(name, NO_LIMITS), f"{field}.{name[:100]}")
        if limits is None or (name.endswith("*") and after[name] == NO_LIMITS):
            del after[name]  # one of each others' limits again
    if len(after) > MOST_NAMED:
        raise invalid_value(field, f"are of {len(after)} names; {MOST_NAMED} are the most")
    return after


def _place_of(team: Team, value: str) -> str:
    return value if value == "*" else team.hash_of(value)


def apply_limits(
    wanted: LimitsInput | ModelLimitsInput | None, before: Limits = NO_LIMITS, place: str = "limits"
) -> Limits:
    """Return ``before`` with what ``wanted`` says; None takes every limit away. Raises BadRequest."""
    if wanted is None:
        return NO_LIMITS
    changes: dict[str, int | None] = {}
    for name, value in asdict(wanted).items():
        if value is UNSET:
            continue
        field = name.replace("usd_", "nanousd_")
        changes[field] = None if value is None else _amount(f"{place}.{name}", value)
    return replace(before, **changes)


def _amount(place: str, value: int | Decimal) -> int:
    if isinstance(value, Decimal):
        if value.is_finite() and 0 <= value <= MOST_DOLLARS:
            return to_nano(value)
        raise invalid_value(place, f"must be dollars from 0 to {MOST_DOLLARS}")
    if 0 <= value <= MOST_COUNT:
        return value
    raise invalid_value(place, "must be a whole number of 0 or more; null takes the limit away")


def check_moment(value: datetime | float | None, now: datetime) -> datetime | None:
    """Return a moment to come, with its zone. Raises BadRequest."""
    if value is None:
        return None
    if isinstance(value, datetime):
        moment = value.replace(tzinfo=UTC) if value.tzinfo is None else value
    else:
        try:
            moment = datetime.fromtimestamp(value, UTC)
        except (ValueError, OverflowError, OSError):
            raise invalid_value(
                "expires_at", "must be a date and time such as 2027-01-31T00:00:00Z, or unix seconds"
            ) from None
    if moment > now:
        return moment
    raise invalid_value("expires_at", "must lie in the future")


def check_overlap(value: str | float, least: float = 0.0) -> float:
    """Return an overlap in seconds, at least ``least`` of them. Raises BadRequest."""
    seconds = value if isinstance(value, float | int) else read_duration(value)
    if seconds is not None and least <= seconds <= LONGEST_OVERLAP:
        return float(seconds)
    known = f"30m or 24h, at least {least:.0f}s" if least else "30m, 24h or 0s"
    raise invalid_value("overlap", f"must be seconds or a duration such as {known}, and at most 90d")
