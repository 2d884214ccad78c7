# Teams, keys and the audit log as admins see them: the same shapes over HTTP and on the command line. Money shows as
# exact decimal dollars, moments as RFC 3339 in UTC.

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from msgspec.structs import asdict

from billing.core.holds import Limits, NamedLimits
from billing.core.money import to_text
from billing.core.prices import UNIT_PRICES, Price, Rates
from billing.upkeep.scope_room import ScopeRoom
from gateway.accounts.admin_keys import AdminKeyRecord
from gateway.accounts.provider_keys import ProviderKeyRecord
from gateway.accounts.schemas import ModelLimitsInput
from gateway.accounts.team_keys import KeyRecord, NewlyMade
from gateway.accounts.team_secrets import SecretRecord
from gateway.accounts.teams import TeamRecord
from gateway.core.principals import Admin, Team
from gateway.egress.urls import read_url
from gateway.storage.audit_log import AuditEntry
from protocol.errors import invalid_value


def dollars(nano: int) -> Decimal:
    """Return nano-dollars as the exact number of dollars."""
    return Decimal(to_text(nano))


def cost_view(nano: int) -> dict[str, Any]:
    """Return a cost in dollars: as a number, and as text for JSON parsers that read numbers as floats."""
    exact = to_text(nano)
    return {"cost_usd": Decimal(exact), "cost_usd_exact": exact}


def moment(value: datetime | None) -> str | None:
    """Return a moment as text: ``2026-04-05T14:00:00Z``, to the microsecond where it has some."""
    return None if value is None else value.astimezone(UTC).isoformat().replace("+00:00", "Z")


def moment_of(seconds: float | None) -> str | None:
    """Return a moment in unix seconds as text."""
    return None if seconds is None else moment(datetime.fromtimestamp(seconds, UTC))


def shown(record: object, *names: str) -> dict[str, Any]:
    """Return fields of a record by their names, moments as text. What may be seen is named: a record may hold more."""
    values = ((name, getattr(record, name)) for name in names)
    return {name: moment(value) if isinstance(value, datetime) else value for name, value in values}


def limits_view(limits: Limits) -> dict[str, Any]:
    """Return every limit by the name that admins give it; null is none."""
    return in_dollars(asdict(limits))


def in_dollars(told: Any) -> Any:
    """Return what is told with its money in dollars, at any depth: ``usd_per_day`` for ``nanousd_per_day``."""
    if not isinstance(told, dict):
        return told
    return {
        name.replace("nanousd", "usd"): dollars(value)
        if "nanousd" in name and isinstance(value, int)
        else in_dollars(value)
        for name, value in told.items()
    }


def model_limits_view(limits: Mapping[str, Limits]) -> dict[str, Any]:
    """Return the limits for one model each; models without any are left out."""
    return {name: _budget_limits(of) for name, of in sorted(limits.items()) if of != Limits()}


def value_limits_view(team: Team) -> dict[str, Any]:
    """Return a team's limits of end users and of tags by name, and what becomes of calls that name no end user."""
    tags = [one for of_key in team.tag_limits.values() for one in of_key.values()]
    return {
        "user_limits": _named_view(team.user_limits.values()),
        "tag_limits": _named_view(tags),
        "calls_without_user": team.calls_without_user,
    }


def _named_view(found: Iterable[NamedLimits]) -> dict[str, Any]:
    return {one.name: _budget_limits(one.limits) for one in sorted(found, key=lambda one: one.name)}


def _budget_limits(limits: Limits) -> dict[str, Any]:
    view = limits_view(limits)
    return {name: view[name] for name in ModelLimitsInput.__struct_fields__}


def price_view(price: Price) -> dict[str, Any]:
    """Return what a model charges, in dollars per million tokens, request or unit, as tollgate.yaml has it."""
    view: dict[str, Any] = _rates_view(price)
    if price.request:
        view["request"] = dollars(price.request)
    view |= {kind: dollars(rate) for _, kind in UNIT_PRICES if (rate := getattr(price, kind)) is not None}
    if price.pictures:
        rows = ((row, shown(row, "quality", "size")) for row in price.pictures)
        view["pictures"] = [said | {"image": dollars(row.price)} for row, said in rows]
    if price.batch_discount != 1:
        view["batch_discount"] = price.batch_discount
    if price.steps:
        view["steps"] = [{"above": step.above, **_rates_view(step)} for step in price.steps]
    return view


def _rates_view(rates: Rates) -> dict[str, Any]:
    each = ((name, getattr(rates, name)) for name in Rates.__struct_fields__)
    return {name: dollars(rate) for name, rate in each if rate is not None}


def budgets_view(room: ScopeRoom) -> dict[str, Any]:
    """Return what is used, held and left of each budget, money in dollars; ``left`` is null without a limit."""
    view: dict[str, Any] = {}
    for name, budget in asdict(room).items():
        parts = shown(budget, "used", "held", "left")
        if "nanousd" in name:
            parts = {part: None if value is None else dollars(value) for part, value in parts.items()}
        view[name.replace("nanousd", "usd")] = parts
    return view


def team_scopes(team: Team) -> dict[str, Limits]:
    """Return the scopes of a team that have budgets of their own, with their limits: itself, and its limited models."""
    limited = {f"model:{team.id}/{name}": of for name, of in sorted(team.model_limits.items()) if of != Limits()}
    return {f"team:{team.id}": team.limits, **limited}


def team_budgets_view(team: Team, rooms: Mapping[str, ScopeRoom]) -> dict[str, Any]:
    """Return the budgets of a team, and of its limits for models."""
    of_models = f"model:{team.id}/"
    budgets = {
        name.removeprefix(of_models): budgets_view(room) for name, room in rooms.items() if name.startswith(of_models)
    }
    return {"budgets": budgets_view(rooms[f"team:{team.id}"]), "model_budgets": budgets}


def read_value_prefix(team: Team, of: str) -> tuple[str, Mapping[str, NamedLimits]]:
    """Return what the scopes of end users ("user") or of a tag ("metadata:KEY") begin with, and their limits. Raises
    BadRequest."""
    if of == "user":
        return f"user:{team.id}/", team.user_limits
    kind, _, key = of.partition(":")
    if kind == "metadata" and key in team.tag_limits:
        return f"tag:{team.id}/{key}=", team.tag_limits[key]
    known = ", ".join(["user", *(f"metadata:{key}" for key in team.tag_limits)])
    raise invalid_value("of", f"is what the team has limits of: {known}")


def value_budgets_view(which: str, limits: Mapping[str, NamedLimits], rooms: Mapping[str, ScopeRoom]) -> dict[str, Any]:
    """Return the budgets of the end user or the tag's value of a scope; ``name`` where limits of its own tell it."""
    ident = which[-32:]
    found = limits.get(ident)
    return {
        "object": "value_budgets",
        "id": ident,
        "name": None if found is None else found.name,
        "budgets": budgets_view(rooms[which]),
    }


def team_view(record: TeamRecord) -> dict[str, Any]:
    """Return a team."""
    team = record.team
    return {
        "object": "team",
        **shown(team, "id", "name", "weight", "allow_smaller", "safety"),
        "allowed_models": None if team.allowed_models is None else sorted(team.allowed_models),
        "limits": limits_view(team.limits),
        "model_limits": model_limits_view(team.model_limits),
        **value_limits_view(team),
        "suspended": team.is_suspended,
        **shown(team, "company_keys", "own_key_cost", "contents"),
        **shown(record, "webhook_url", "cost_centre", "suspended_at", "deleted_at", "created_at", "updated_at"),
    }


def key_view(record: KeyRecord, now: datetime) -> dict[str, Any]:
    """Return a key, without the key."""
    return {
        "object": "key",
        **shown(record, "key_id", "team_id", "name", "prefix"),
        "status": record.status(now),
        "limits": limits_view(record.limits),
        **shown(record, "allowed_models", "allowed_addresses", "allowed_endpoints", "cache"),
        **shown(record, "created_at", "expires_at", "revoked_at", "last_used_at", "previous_until"),
        "replaced_by": record.replaced_by,
    }


def made_view(made: NewlyMade, now: datetime) -> dict[str, Any]:
    """Return a key at its making: this once with the key itself."""
    view = key_view(made.record, now)
    replaced = {} if made.replaces is None else {"replaces": key_view(made.replaces, now)}
    return {"object": "key", "key_id": view["key_id"], "key": made.key, **view, **replaced}


def admin_key_view(record: AdminKeyRecord, now: datetime) -> dict[str, Any]:
    """Return an admin key, without the key."""
    return {
        "object": "admin_key",
        **shown(record, "key_id", "role", "team_id", "name", "prefix"),
        "status": record.status(now),
        **shown(record, "person", "created_by", "created_at", "expires_at", "revoked_at", "last_used_at"),
    }


def identity_view(admin: Admin) -> dict[str, Any]:
    """Return who an admin is, to themselves."""
    who = shown(admin, "role", "team_id", "name", "person", "actor")
    return {"object": "identity", **who, "expires_at": moment_of(admin.expires_at)}


def audit_view(entry: AuditEntry) -> dict[str, Any]:
    """Return one line of the audit log."""
    said = {"created_at": moment(entry.created_at), "details": in_dollars(entry.details), "object": "audit_entry"}
    return {**asdict(entry), **said}


def record_view(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a row of the ledger, its money in dollars."""
    view = {"object": "usage_record", **row}
    view |= cost_view(view.pop("cost_nanousd")) | {"gpu_cost_usd": dollars(view.pop("gpu_cost_nanousd"))}
    view["saved_usd"] = dollars(view.pop("saved_nanousd"))
    view["tier_saved_usd"] = dollars(view.pop("discount_nanousd"))
    return {**view, "request_id": str(row["request_id"]), "created_at": moment(row["created_at"])}


def webhook_secret_view(record: SecretRecord) -> dict[str, Any]:
    """Return a webhook secret, without the secret."""
    return {"object": "webhook_secret", **asdict(record), "created_at": moment(record.created_at)}


def provider_key_view(record: ProviderKeyRecord) -> dict[str, Any]:
    """Return a team's key of a provider, without the key."""
    moments = {name: moment(getattr(record, name)) for name in ("created_at", "rotated_at")}
    return {"object": "provider_key", **asdict(record), **moments}


def callback_view(row: Mapping[Any, Any], now: datetime) -> dict[str, Any]:
    """Return a callback of the outbox and what became of it. Its URL as logs may show it."""
    is_leased = row["lease_until"] is not None and row["lease_until"] > now
    ends = {"delivered": row["delivered_at"], "undelivered": row["given_up_at"]}
    open_as = "delivering" if is_leased else "pending"
    state = next((name for name, moment_of_end in ends.items() if moment_of_end is not None), open_as)
    return {
        "object": "callback",
        **{name: row[name] for name in ("id", "team_id", "batch_id", "event")},
        "url": read_url(row["url"]).shown,
        "state": state,
        **{name: row[name] for name in ("tries", "last_status", "last_error")},
        "created_at": moment(row["created_at"]),
        "next_try_at": moment(row["next_try_at"]) if state == "pending" else None,
        **{name: moment(row[name]) for name in ("delivered_at", "given_up_at")},
    }


def list_view(items: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Return a page in OpenAI's shape of a list: ``items`` may hold one more than ``limit``, which tells of a next."""
    return {"object": "list", "data": items[:limit], "has_more": len(items) > limit}
